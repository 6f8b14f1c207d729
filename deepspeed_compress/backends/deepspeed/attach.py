"""Entry points for an existing engine: `attach` compresses its traffic, and `detach` undoes that."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_compress.backends.activations.crossover import Crossover
from deepspeed_compress.backends.deepspeed import comms_log, losses, norms, offloaded_shards, parallel, seams
from deepspeed_compress.backends.deepspeed.activations import experts, pipeline, sequence, tensor
from deepspeed_compress.backends.deepspeed.activations.limits import refuse_idle_activations
from deepspeed_compress.backends.deepspeed.activations.measured import measure_engine
from deepspeed_compress.backends.deepspeed.announce import (
    announce,
    warn_of_ignored_type,
    warn_of_micro_steps,
    warn_of_single_rank_hosts,
    warn_of_uncounted,
)
from deepspeed_compress.backends.deepspeed.attachment import describe, find_parameters
from deepspeed_compress.backends.deepspeed.gradients.zero_0 import attach_zero_0
from deepspeed_compress.backends.deepspeed.gradients.zero_3 import attach_zero_3
from deepspeed_compress.backends.deepspeed.gradients.zero_12 import attach_zero_12
from deepspeed_compress.backends.deepspeed.groups import destroy_with_engine
from deepspeed_compress.backends.deepspeed.limits import engine_kind, find_limits, refuse_unsupported
from deepspeed_compress.backends.deepspeed.losses import follow_losses
from deepspeed_compress.backends.deepspeed.node_shards import attach_nodes, equalize_weights
from deepspeed_compress.backends.deepspeed.norms import Norms, loss_scale
from deepspeed_compress.backends.deepspeed.ownership import check_ownership
from deepspeed_compress.backends.deepspeed.restarts import attach_heartbeat
from deepspeed_compress.backends.deepspeed.rollout import attach_rollout
from deepspeed_compress.backends.deepspeed.step import Steps, follow_steps
from deepspeed_compress.backends.deepspeed.units import IslandUnit, NodeUnit, RankUnit, deciding_group, node_unit
from deepspeed_compress.backends.deepspeed.weights import master_weights
from deepspeed_compress.backends.deepspeed.weights.zero_3 import attach_weights_3, check_weights_3
from deepspeed_compress.backends.deepspeed.weights.zero_12 import Weights, attach_weights, check_weights
from deepspeed_compress.checkpointing.deepspeed.background import attach_background
from deepspeed_compress.checkpointing.deepspeed.checkpoint import CompressionState
from deepspeed_compress.checkpointing.deepspeed.participants import Participant, attach_participants
from deepspeed_compress.checkpointing.deepspeed.resharding import Resharding
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.weight_reduction import WeightReduction
from deepspeed_compress.config import Activations, CompressConfig, CompressedWeights, check_world, parse_section
from deepspeed_compress.errors import CompressError, ConfigError, UnsupportedError
from deepspeed_compress.local_sgd.deepspeed.divided import attach_islands, stay_apart
from deepspeed_compress.local_sgd.deepspeed.elastic import attach_elastic
from deepspeed_compress.monitor import write_configuration
from deepspeed_compress.session.exact import attach_exact
from deepspeed_compress.session.observer import PolicyInputs, largest_of_all
from deepspeed_compress.session.parts import Parts, make_parts
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.probing import Prober, WeightTraffic
from deepspeed_compress.session.protocols import BackgroundCheckpoints, IslandExchanges
from deepspeed_compress.session.session import Session
from deepspeed_compress.session.torch_version import check_torch

__all__ = ["attach", "attach_section", "detach"]

WeightBytes = Callable[[], int]
"""Function that returns the bytes that this rank sends for weights in one optimizer step."""


@dataclass(frozen=True)
class _Stage:
    """Seams of a kind of engine.

    Attributes:
        attach: replaces the reduction of gradients.
        gradient_seams: seams that `attach` needs.
        check_weights: raises UnsupportedError if weights cannot be compressed.
        weight_seams: seams that compressed weights need.
    """

    attach: Callable[[Any, Session], WeightBytes]
    gradient_seams: tuple[seams.Seam, ...]
    check_weights: Callable[[Any], None] = check_weights
    weight_seams: tuple[seams.Seam, ...] = seams.WEIGHTS


_STAGES: Mapping[str, _Stage] = MappingProxyType(
    {
        "zero_0": _Stage(attach_zero_0, seams.ZERO_0),
        "zero_12": _Stage(attach_zero_12, seams.ZERO_12),
        "zero_3": _Stage(attach_zero_3, seams.ZERO_3, check_weights_3, seams.WEIGHTS_3),
    }
)
"""Stages by kind of engine (see `engine_kind`)."""


def attach(engine: Any) -> Any:
    """Compress the traffic of an existing engine. Call it on all ranks, before the first step and before loading.

    The section is read from `engine.config`, the ds_config with which the engine was made.

    Args:
        engine: a DeepSpeedEngine or PipelineEngine with an optimizer.

    Returns:
        The same engine. `engine.compression` is its `Session`.

    Raises:
        ConfigError: the section is missing or invalid, or the engine already has a session.
        UnsupportedError: this engine cannot be compressed correctly.
        SeamError: this version of DeepSpeed or PyTorch is not supported.

    Examples:
        >>> engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
        >>> deepspeed_compress.attach(engine)
    """
    _check_type(engine)
    return attach_section(engine, parse_section(engine.config))


def _check_type(engine: Any) -> None:
    if not isinstance(engine, DeepSpeedEngine):
        raise UnsupportedError(
            f"expected a DeepSpeedEngine, got {type(engine).__name__}; use ddp.attach or fsdp2.attach for a torch "
            "model, or initialize for a model without an engine"
        )


def attach_section(engine: Any, config: CompressConfig, unit: IslandUnit | None = None) -> Any:
    """Attach to `engine` as the section `config` says. If this raises, the engine is left unchanged.

    Args:
        engine: the engine.
        config: the section.
        unit: the division of the job's ranks into islands; None if they were not divided.

    Returns:
        The same engine.

    Raises:
        ConfigError: see `attach`.
        UnsupportedError: see `attach`.
        SeamError: see `attach`.
    """
    # The engine forwards unknown names to the user's model, so `hasattr` is not reliable.
    if "compression" in vars(engine):
        raise ConfigError("the engine is already attached: call attach once, or use only initialize or install")
    _check_on_all_ranks(engine, config, unit)
    warn_of_single_rank_hosts(config, unit)
    patches = Patches()
    with patches.undone_on_failure():
        _attach(engine, config, unit, patches)
    return engine


def _check_on_all_ranks(engine: Any, config: CompressConfig, island: IslandUnit | None) -> None:
    """Check that `engine` can be attached to. Collective: what one rank refuses, all ranks refuse.

    Stages of a pipeline differ, and no rank may wait for one that has stopped.
    """
    own: CompressError | None = None
    try:
        _check(engine, config, island)
    except CompressError as error:
        own = error
    every = gather_objects(own)
    refused = own or next((one for one in every if one is not None), None)
    if refused is not None:
        raise refused


def _attach(engine: Any, config: CompressConfig, island: IslandUnit | None, patches: Patches) -> None:
    """Attach all parts to the engine, in this order. Each part receives the earlier ones that it needs."""
    node = node_unit(engine)
    if node is not None:
        equalize_weights(engine, node)
    parameters = find_parameters(engine)
    warn_of_ignored_type(engine, config, parameters.dtype)
    warn_of_micro_steps(engine, config)
    parts = make_parts(describe(engine, config, island, parameters), patches)
    if parts.reductions is not None:
        made = [one for groups in parts.reductions.groups for one in (groups.node, groups.across, groups.downward)]
        destroy_with_engine(engine, made, patches)
    if island is not None:
        patches.on_undo(partial(stay_apart, engine, island))
    session, participants = _make_session(engine, island, parts)
    steps = _make_steps(engine, parts, session)
    _attach_activations(engine, parts)
    attach_participants(engine, participants, patches)
    follow_steps(steps)
    attach_heartbeat(engine, session)
    session.begin(engine.global_steps, loss_scale(engine))
    patches.replace(engine, "compression", session)
    if engine.global_rank == 0:
        write_configuration(session.journal, engine.config)
    announce(engine, session, parameters, engine_kind(engine), _measure_activations(engine, session))
    # Last, because it is collective: an earlier failure may have occurred on one rank only.
    patches.on_undo(session.renew_weights)
    patches.on_undo(session.discard_unfinished)


def _make_session(engine: Any, island: IslandUnit | None, parts: Parts) -> tuple[Session, Sequence[Participant]]:
    """Return the session, and the participants in saving and loading, the outermost one first.

    The parts that the session receives in its constructor are attached here, in this order: compressed weights under
    ZeRO 1 and 2, figures for the policy, checkpoints in the background, and islands.
    """
    config, patches = parts.config, parts.patches
    weights = _attach_difference_weights(engine, parts)
    exact = None if weights is None else attach_exact(engine, weights.synchronise, patches)
    inputs = _policy_inputs(engine, parts, None if weights is None else weights.traffic())
    saving = None if config.checkpointing is None else attach_background(engine, config.checkpointing, patches)
    islands, island_files = _attach_islands(engine, island, parts, saving)
    slowest = partial(largest_of_all, device=engine.device, group=deciding_group(engine))
    session = Session(parts, inputs, exact, saving, islands, slowest)
    participants = (saving, island_files, CompressionState(engine, session), Resharding(engine, config))
    return session, [one for one in participants if one is not None]


def _make_steps(engine: Any, parts: Parts, session: Session) -> Steps:
    """Return the replacement for the optimizer step.

    The parts that it calls are attached here, in this order: means over nodes, or else the engine's own collectives;
    the norm of gradients; the traffic of other kinds of parallelism; and weights for rollout workers.
    """
    node = node_unit(engine)
    nodes = None if node is None else attach_nodes(engine, node, session)
    weight_bytes = _no_bytes if nodes else _replace_collectives(engine, parts, session)
    norms = Norms(engine, parts.policy.skips) if parts.policy.guards else None
    ended = parallel.count_parallel(engine, parts.run.meter, parts.patches)
    settings = parts.config.rollout
    rollout = None if settings is None else attach_rollout(engine, settings, session.journal, parts.patches)
    return Steps(engine, session, norms, weight_bytes, ended, nodes, rollout)


def _check(engine: Any, config: CompressConfig, island: IslandUnit | None) -> None:
    """Check that `engine` can be attached to. Raises the errors of `attach`."""
    seams.check_version(deepspeed.__version__)
    check_torch(torch.__version__)
    check_world(config, dist.get_world_size(), engine.config)
    stage = _STAGES[engine_kind(engine)]
    refuse_unsupported(engine, config)
    refuse_idle_activations(engine, config)
    watched = norms.SEAMS + losses.SEAMS if config.guard is not None or config.adaptive is not None else ()
    in_nodes = node_unit(engine) is not None
    copied = master_weights.SEAMS if in_nodes or config.islands is not None else ()
    averaged = offloaded_shards.SEAMS if in_nodes else ()
    seams.check_seams(
        seams.STEP + stage.gradient_seams + parallel.SEAMS + comms_log.SEAMS + watched + copied + averaged,
        deepspeed.__version__,
    )
    if config.activations is not None:
        used = () if config.activations.experts is None else experts.SEAMS
        seams.check_seams(tensor.SEAMS + pipeline.SEAMS + sequence.SEAMS + used, deepspeed.__version__)
    if config.weights.method != "none":
        stage.check_weights(engine)
        seams.check_seams(stage.weight_seams, deepspeed.__version__)
    _check_divided(engine, config, island)
    check_ownership(engine, config)


def _check_divided(engine: Any, config: CompressConfig, island: IslandUnit | None) -> None:
    """Check that ranks were divided into islands or nodes before the engine was made, if the section says so.

    Raises:
        ConfigError: they were not.
    """
    islands, parallelism = config.islands, config.parallelism
    missing: type[RankUnit] | None = None
    if islands is not None and islands.elastic is None and island is None:
        missing = IslandUnit
    if parallelism is not None and parallelism.shard_within is not None and node_unit(engine) is None:
        missing = NodeUnit
    if missing is not None:
        raise ConfigError(
            f"{missing.pointer} divides ranks before an engine is made, but this engine already exists: use "
            "deepspeed_compress.initialize or install, or remove the key"
        )


def _attach_difference_weights(engine: Any, parts: Parts) -> Weights | None:
    """Compress the weights that the optimizer sends; None if they are not compressed, or gathered as ZeRO 3 does."""
    written = parts.config.weights
    if engine_kind(engine) == "zero_3" or not isinstance(written, CompressedWeights):
        return None
    return attach_weights(
        engine,
        lambda settings: WeightReduction(settings, parts.parameters, parts.run).difference_gather,
        written,
        lambda: parts.settings.weights,
        parts.patches,
    )


def _attach_islands(
    engine: Any, unit: IslandUnit | None, parts: Parts, saving: BackgroundCheckpoints | None
) -> tuple[IslandExchanges | None, Participant | None]:
    """Return the exchanges with other islands, and their participant in saving and loading; None without islands."""
    if unit is not None:
        return attach_islands(engine, unit, parts.parameters, parts)
    if parts.config.islands is None:
        return None, None
    island = attach_elastic(engine, parts.parameters, parts, saving)
    return island, island


def _attach_activations(engine: Any, parts: Parts) -> None:
    """Compress what ranks that hold different parts of the model send to each other, if the section says so."""
    activations = parts.config.activations or Activations()
    if activations.tensor is not None:
        tensor.attach_tensor(engine, activations.tensor, parts.run, parts.patches)
    if activations.pipeline is not None:
        pipeline.attach_pipeline(engine, activations.pipeline, parts.run, parts.patches)
    if activations.experts is not None:
        experts.attach_experts(engine, activations.experts, parts.run.meter, parts.patches)
    if activations.sequence is not None:
        sequence.attach_sequence(engine, activations.sequence, parts.run, parts.patches)


def _measure_activations(engine: Any, session: Session) -> list[Crossover]:
    """Measure compressed messages of activations, and record an event for each kind that costs time on this link."""
    activations = session.config.activations
    measured = [] if activations is None else measure_engine(engine, activations)
    for one in measured:
        if not one.pays:
            session.record(one.event(engine.global_steps))
    return measured


def _policy_inputs(engine: Any, parts: Parts, weights: WeightTraffic | None) -> PolicyInputs | None:
    if not parts.policy.observes:
        return None
    prober, group = None, deciding_group(engine)
    if parts.policy.adaptation is not None:
        prober = Prober(parts.policy.adaptation.adaptive, parts.parameters, engine.device, group, weights)
    largest = partial(largest_of_all, device=engine.device, group=group)
    return PolicyInputs(follow_losses(engine, parts.patches), largest, prober)


def _replace_collectives(engine: Any, parts: Parts, session: Session) -> WeightBytes:
    """Replace or count the reduction of gradients, and the gather of weights under ZeRO 3.

    Returns:
        A function that returns the bytes of weights that remain to be counted after an optimizer step.
    """
    kind, weights = engine_kind(engine), parts.config.weights
    uncounted = find_limits(engine)
    if uncounted:
        # A single rank sends none.
        if engine.seq_data_parallel_group.size() > 1:
            warn_of_uncounted(uncounted)
        return _no_bytes
    weight_bytes = _STAGES[kind].attach(engine, session)
    if not isinstance(weights, CompressedWeights):
        return weight_bytes
    if kind == "zero_3":
        attach_weights_3(engine, WeightReduction(weights, parts.parameters, parts.run), session)
        return weight_bytes
    # Compressed weights are counted when they are sent.
    return lambda: weight_bytes() if session.weights is None else 0


def _no_bytes() -> int:
    return 0


def detach(engine: Any) -> Any:
    """Remove everything that `attach` added to `engine`. Call it between steps, on all ranks.

    The engine continues as a plain DeepSpeed engine. Residuals are dropped, and compressed weights are first set to
    their fp32 master weights. Settings that the section added to the engine's configuration (`overlap_comm`,
    parallelism) stay.

    Args:
        engine: an engine from `attach`, `initialize` or `install`.

    Returns:
        The same engine.

    Raises:
        ConfigError: nothing is attached.
        UnsupportedError: `engine` is not an engine, or its model is sharded within nodes.
        SeamError: other code has wrapped a method since. Nothing is changed.
    """
    _check_type(engine)
    session = vars(engine).get("compression")
    if session is None:
        raise ConfigError("nothing is attached to this engine; pass an engine from attach, initialize or install")
    if node_unit(engine) is not None:
        raise UnsupportedError(
            f"{NodeUnit.pointer}: DeepSpeed alone would not average gradients over the nodes, so the engine cannot be "
            'detached; destroy it, or write "gradients": {"method": "none"} to train uncompressed'
        )
    session.patches.undo()
    return engine
