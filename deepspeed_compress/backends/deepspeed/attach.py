"""Entry points for an existing engine: `attach` compresses its traffic, and `detach` undoes that."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_compress.backends.deepspeed import byte_counts
from deepspeed_compress.backends.deepspeed.activations.attach import attach_activations, measure_activations
from deepspeed_compress.backends.deepspeed.announce import (
    announce,
    warn_of_ignored_type,
    warn_of_micro_steps,
    warn_of_single_rank_hosts,
    warn_of_uncounted,
)
from deepspeed_compress.backends.deepspeed.attachment import describe
from deepspeed_compress.backends.deepspeed.checks import check_on_all_ranks
from deepspeed_compress.backends.deepspeed.engine_facts import engine_kind, find_parameters
from deepspeed_compress.backends.deepspeed.gradients.zero_0 import attach_zero_0
from deepspeed_compress.backends.deepspeed.gradients.zero_3 import attach_zero_3
from deepspeed_compress.backends.deepspeed.gradients.zero_12 import attach_zero_12
from deepspeed_compress.backends.deepspeed.groups import destroy_with_engine
from deepspeed_compress.backends.deepspeed.limits import find_limits
from deepspeed_compress.backends.deepspeed.node_shards import attach_nodes, equalize_weights
from deepspeed_compress.backends.deepspeed.norms import Norms, loss_scale
from deepspeed_compress.backends.deepspeed.passes import follow_losses, watch_steps
from deepspeed_compress.backends.deepspeed.restarts import attach_heartbeat
from deepspeed_compress.backends.deepspeed.rollout import attach_rollout
from deepspeed_compress.backends.deepspeed.step import Steps, follow_steps
from deepspeed_compress.backends.deepspeed.units import IslandUnit, NodeUnit, deciding_group, node_unit
from deepspeed_compress.backends.deepspeed.weights.zero_3 import attach_weights_3
from deepspeed_compress.backends.deepspeed.weights.zero_12 import Weights, attach_weights
from deepspeed_compress.checkpointing.deepspeed.background import attach_background
from deepspeed_compress.checkpointing.deepspeed.checkpoint import CompressionState
from deepspeed_compress.checkpointing.deepspeed.participants import Participant, attach_participants
from deepspeed_compress.checkpointing.deepspeed.resharding import Resharding
from deepspeed_compress.collectives.weight_reduction import WeightReduction
from deepspeed_compress.config import CompressConfig, CompressedWeights, parse_section
from deepspeed_compress.errors import ConfigError, UnsupportedError
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

__all__ = ["attach", "attach_section", "detach"]

WeightBytes = Callable[[], int]
"""Function that returns the bytes that this rank sends for weights in one optimizer step."""


_REPLACE_REDUCTION: Mapping[str, Callable[[Any, Session], WeightBytes]] = {
    "zero_0": attach_zero_0,
    "zero_12": attach_zero_12,
    "zero_3": attach_zero_3,
}
"""Functions that replace the reduction of gradients, by kind of engine (see `engine_kind`)."""


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
    check_on_all_ranks(engine, config, unit)
    warn_of_single_rank_hosts(config, unit)
    patches = Patches()
    with patches.undone_on_failure():
        _attach(engine, config, unit, patches)
    return engine


def _attach(engine: Any, config: CompressConfig, island: IslandUnit | None, patches: Patches) -> None:
    """Attach all parts to the engine, in this order. Each part receives the earlier ones that it needs."""
    node = node_unit(engine)
    if node is not None:
        equalize_weights(engine, node, is_new=True)
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
    if config.activations is not None:
        attach_activations(engine, config.activations, parts.run, patches)
    attach_participants(engine, participants, patches)
    follow_steps(steps)
    attach_heartbeat(engine, session)
    session.begin(engine.global_steps, loss_scale(engine))
    patches.replace(engine, "compression", session)
    if engine.global_rank == 0:
        write_configuration(session.journal, engine.config)
    measured = [] if config.activations is None else measure_activations(engine, config.activations, session)
    announce(engine, session, parameters, engine_kind(engine), measured)
    # Last, because it is collective: an earlier failure may have occurred on one rank only.
    patches.on_undo(session.renew_weights)
    patches.on_undo(session.gradients.discard_unfinished)


def _make_session(engine: Any, island: IslandUnit | None, parts: Parts) -> tuple[Session, Sequence[Participant]]:
    """Return the session, and the participants in saving and loading, the outermost one first.

    The parts that the session receives in its constructor are attached here, in this order: compressed weights under
    ZeRO 1 and 2, figures for the policy, checkpoints in the background, and islands.
    """
    config, patches = parts.config, parts.patches
    weights = _attach_difference_weights(engine, parts)
    exact = None if weights is None else attach_exact(engine, weights.synchronise, parts.run.meter, patches)
    inputs = _policy_inputs(engine, parts, None if weights is None else weights.traffic())
    saving = None if config.checkpointing is None else attach_background(engine, config.checkpointing, patches)
    islands, island_files = _attach_islands(engine, island, parts, saving)
    largest = partial(largest_of_all, device=engine.device, group=deciding_group(engine))
    watch = None if config.auto is None else watch_steps(engine, patches)
    session = Session(parts, inputs, exact, saving, islands, largest, watch)
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
    norms = None if parts.policy.guard is None else Norms(engine, parts.policy.guard.skips)
    ended = byte_counts.count_parallel(engine, parts.run.meter, parts.patches)
    settings = parts.config.rollout
    rollout = None if settings is None else attach_rollout(engine, settings, session.journal, parts.patches)
    return Steps(engine, session, norms, weight_bytes, ended, nodes, rollout)


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


def _policy_inputs(engine: Any, parts: Parts, weights: WeightTraffic | None) -> PolicyInputs | None:
    if not parts.policy.observes:
        return None
    prober, group = None, deciding_group(engine)
    if parts.policy.adaptation is not None:
        prober = Prober(parts.policy.adaptation.selector, parts.parameters, engine.device, group, weights)
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
    weight_bytes = _REPLACE_REDUCTION[kind](engine, session)
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
