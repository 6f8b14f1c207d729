"""Entry points for an existing engine: `attach` compresses its traffic, and `detach` undoes that."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.activations.attach import attach_activations, measure_activations
from deepspeed_compress.backends.deepspeed.announce import announce, find_idle_keys
from deepspeed_compress.backends.deepspeed.byte_counts import count_parallel, make_byte_report
from deepspeed_compress.backends.deepspeed.checks import check_on_all_ranks
from deepspeed_compress.backends.deepspeed.engine_facts import engine_kind, find_parameters
from deepspeed_compress.backends.deepspeed.gradients.zero_0 import attach_zero_0, may_begin_early
from deepspeed_compress.backends.deepspeed.gradients.zero_3 import attach_zero_3
from deepspeed_compress.backends.deepspeed.gradients.zero_12 import attach_zero_12
from deepspeed_compress.backends.deepspeed.groups import destroy_with_engine, find_separate, make_groups
from deepspeed_compress.backends.deepspeed.limits import find_limits
from deepspeed_compress.backends.deepspeed.node_gradients import may_average_early
from deepspeed_compress.backends.deepspeed.node_shards import attach_nodes, equalize_weights
from deepspeed_compress.backends.deepspeed.norms import Norms, loss_scale
from deepspeed_compress.backends.deepspeed.restarts import attach_heartbeat
from deepspeed_compress.backends.deepspeed.rollout import attach_rollout
from deepspeed_compress.backends.deepspeed.steps import OptimizerStep, follow_losses, watch_steps
from deepspeed_compress.backends.deepspeed.units import IslandUnit, NodeUnit, deciding_group, node_unit
from deepspeed_compress.backends.deepspeed.weights.zero_3 import attach_weights_3
from deepspeed_compress.backends.deepspeed.weights.zero_12 import Weights
from deepspeed_compress.checkpointing.deepspeed.background import attach_background
from deepspeed_compress.checkpointing.deepspeed.checkpoint import CompressionState
from deepspeed_compress.checkpointing.deepspeed.participants import Participant, attach_participants
from deepspeed_compress.checkpointing.deepspeed.resharding import Resharding
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.weight_reduction import WeightReduction
from deepspeed_compress.config import SECTION, CompressConfig, CompressedWeights, parse_section
from deepspeed_compress.errors import CompressWarning, ConfigError, UnsupportedError
from deepspeed_compress.local_sgd.deepspeed.divided import attach_islands
from deepspeed_compress.local_sgd.deepspeed.elastic import attach_elastic
from deepspeed_compress.session.engine import EngineDescription
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.session import ExactWeights, Session

__all__ = ["attach", "attach_section", "detach"]

_REPLACE_REDUCTION: Mapping[str, Callable[[Any, Session], int]] = {
    "zero_0": attach_zero_0,
    "zero_12": attach_zero_12,
    "zero_3": attach_zero_3,
}
"""Functions that replace the reduction of gradients, by kind of engine (see `engine_kind`).

They return the bytes that this rank sends for weights in one optimizer step.
"""


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
    patches = Patches()
    with patches.undone_on_failure():
        _attach(engine, config, unit, patches)
    return engine


def _attach(engine: Any, config: CompressConfig, island: IslandUnit | None, patches: Patches) -> None:
    """Attach everything to the engine, in this order. Each part receives the earlier ones that it needs."""
    node = node_unit(engine)
    if node is not None:
        equalize_weights(engine, node)
    parameters = find_parameters(engine)
    for text in find_idle_keys(engine, config, island, parameters.dtype):
        warnings.warn(text, CompressWarning, stacklevel=3)
    saving = None if config.checkpointing is None else attach_background(engine, config.checkpointing, patches)
    session = Session(_describe(engine, config, island, parameters), patches, saving)
    destroy_with_engine(engine, _made_groups(session), patches)
    _attach_difference_weights(engine, session)
    if session.losses is not None:
        follow_losses(engine, session.losses, patches)
    islands = _attach_islands(engine, island, session)
    if session.watch is not None:
        watch_steps(engine, session.watch, patches)
    nodes = None if node is None else attach_nodes(engine, node, session)
    weight_bytes = (lambda: 0) if nodes else _replace_collectives(engine, session)
    norms = None if session.policy.guard is None else Norms(engine, session.policy.guard.skips)
    stop_counting = count_parallel(engine, session.meter, patches)
    rollout = None if config.rollout is None else attach_rollout(engine, config.rollout, session.journal, patches)
    if config.activations is not None:
        attach_activations(engine, config.activations, session.run, patches)
    participants = (saving, islands, CompressionState(engine, session), Resharding(engine, config))
    attach_participants(engine, [participant for participant in participants if participant is not None], patches)
    step = OptimizerStep(engine, session, norms, weight_bytes, stop_counting, nodes, rollout)
    patches.wrap(engine, "_take_model_step", step.take)
    attach_heartbeat(engine, session)
    session.begin(engine.global_steps, loss_scale(engine))
    patches.replace(engine, "compression", session)
    if engine.global_rank == 0:
        session.journal.write_configuration(engine.config)
    measured = [] if config.activations is None else measure_activations(engine, config.activations, session)
    announce(engine, session, parameters, measured)
    # Last, because it is collective: an earlier failure may have occurred on one rank only.
    patches.on_undo(session.renew_weights)
    patches.on_undo(session.gradients.discard_unfinished)


def _describe(
    engine: Any, config: CompressConfig, island: IslandUnit | None, parameters: Parameters
) -> EngineDescription:
    """Return the description of the engine and of this rank, of which the session is made.

    Args:
        engine: the engine.
        config: the section.
        island: this rank's island, if the ranks of this job were divided into islands; None otherwise.
        parameters: the model's parameters.
    """
    # Without a guard, only loss scalers skip steps: those of DeepSpeed's own optimizers, and torch's.
    scaled = hasattr(engine.optimizer, "overflow") or engine.torch_autocast_z0_gradscaler is not None
    skips = scaled or config.guard is not None
    deciding = deciding_group(engine)
    in_nodes, without_zero = node_unit(engine) is not None, engine_kind(engine) == "zero_0"
    overlaps = may_average_early(engine) if in_nodes else without_zero and may_begin_early(engine)
    return EngineDescription(
        config,
        engine.config,
        parameters,
        engine.device,
        make_byte_report(engine),
        # Each island writes its own decisions, under the id of one common run.
        writes=dist.get_rank(deciding) == 0,
        make_groups=partial(make_groups, engine, config),
        find_separate=partial(find_separate, engine),
        transactional=skips or overlaps,
        deciding=deciding,
        differences=engine_kind(engine) != "zero_3",
        step=engine.global_steps,
        sink=engine.monitor,
        island=None if island is None else island.number,
    )


def _made_groups(session: Session) -> Iterator[ProcessGroup | None]:
    """Yield the groups that were made for the session's messages."""
    for groups in () if session.reductions is None else session.reductions.groups:
        yield from (groups.node, groups.across, groups.downward)


def _attach_difference_weights(engine: Any, session: Session) -> None:
    """Compress the weights that the optimizer sends, unless they are gathered as ZeRO 3 does."""
    written = session.config.weights
    if engine_kind(engine) == "zero_3" or not isinstance(written, CompressedWeights):
        return
    weights = Weights(
        engine,
        lambda settings: WeightReduction(settings, session.parameters, session.run).difference_gather,
        written,
        lambda: session.weights,
        session.patches,
    )
    exact = ExactWeights(lambda: int(engine.global_steps), weights.synchronise, session.meter)
    # All ranks must call it.
    session.patches.precede(engine, "save_16bit_model", exact.synchronise)
    session.send_weights(exact, weights.traffic())


def _attach_islands(engine: Any, unit: IslandUnit | None, session: Session) -> Participant | None:
    """Exchange with other islands, if there are any, and return their participant in saving and loading."""
    if unit is not None:
        return attach_islands(engine, unit, session)
    return None if session.config.islands is None else attach_elastic(engine, session)


def _replace_collectives(engine: Any, session: Session) -> Callable[[], int]:
    """Replace or count the reduction of gradients, and the gather of weights under ZeRO 3.

    Returns:
        A function that returns the bytes of weights that remain to be counted after an optimizer step.
    """
    kind, weights = engine_kind(engine), session.config.weights
    uncounted = find_limits(engine)
    if uncounted:
        # Only method "none" reaches this point. Unknown figures are 0 rather than estimated; a single rank sends none.
        if engine.seq_data_parallel_group.size() > 1:
            text = f"{SECTION}: bytes of gradients and weights cannot be counted, and are reported as 0: "
            warnings.warn(text + "; ".join(uncounted), CompressWarning, stacklevel=4)
        return lambda: 0
    sent = _REPLACE_REDUCTION[kind](engine, session)
    if not isinstance(weights, CompressedWeights):
        return lambda: sent
    if kind == "zero_3":
        attach_weights_3(engine, WeightReduction(weights, session.parameters, session.run), session)
    # Compressed weights are counted when they are sent.
    return lambda: sent if session.weights is None else 0


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
        UnsupportedError: `engine` is not an engine, or its model is sharded within nodes, or it is an island of a job.
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
    if session.config.islands is not None and session.config.islands.elastic is None:
        raise UnsupportedError(
            "/deepspeed_compress/islands: DeepSpeed alone would save the files of all islands in one place, so the "
            "engine cannot be detached; destroy it"
        )
    session.patches.undo()
    return engine
