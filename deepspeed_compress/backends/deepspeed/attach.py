"""Entry points for an existing engine: `attach` compresses its traffic, and `detach` undoes that."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_compress.backends.deepspeed import comms_log, losses, norms, parallel, seams
from deepspeed_compress.backends.deepspeed.announce import announce
from deepspeed_compress.backends.deepspeed.gradients.zero_0 import attach_zero_0, may_begin_early
from deepspeed_compress.backends.deepspeed.gradients.zero_3 import attach_zero_3
from deepspeed_compress.backends.deepspeed.gradients.zero_12 import attach_zero_12
from deepspeed_compress.backends.deepspeed.groups import find_separate, make_groups
from deepspeed_compress.backends.deepspeed.limits import (
    engine_kind,
    find_limits,
    refuse_unsupported,
    shared_parameters,
)
from deepspeed_compress.backends.deepspeed.losses import follow_losses
from deepspeed_compress.backends.deepspeed.node_shards import attach_nodes, equalize_weights
from deepspeed_compress.backends.deepspeed.norms import Norms, loss_scale
from deepspeed_compress.backends.deepspeed.ownership import check_ownership
from deepspeed_compress.backends.deepspeed.restarts import attach_heartbeat
from deepspeed_compress.backends.deepspeed.step import Steps, follow_steps
from deepspeed_compress.backends.deepspeed.units import IslandUnit, NodeUnit, RankUnit, deciding_group, node_unit
from deepspeed_compress.backends.deepspeed.weights.zero_3 import attach_weights_3, check_weights_3
from deepspeed_compress.backends.deepspeed.weights.zero_12 import Weights, attach_weights, check_weights
from deepspeed_compress.checkpointing.deepspeed.background import attach_background
from deepspeed_compress.checkpointing.deepspeed.checkpoint import CompressionState
from deepspeed_compress.checkpointing.deepspeed.participants import Participant, attach_participants
from deepspeed_compress.checkpointing.deepspeed.resharding import Resharding
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.collectives.weight_reduction import WeightReduction
from deepspeed_compress.config import SECTION, CompressConfig, CompressedWeights, check_world, parse_section
from deepspeed_compress.config.names import user_name
from deepspeed_compress.errors import CompressWarning, ConfigError, UnsupportedError
from deepspeed_compress.local_sgd.deepspeed.divided import attach_islands, stay_apart
from deepspeed_compress.local_sgd.deepspeed.elastic import attach_elastic
from deepspeed_compress.monitor import write_configuration
from deepspeed_compress.policy import AllowedChoices
from deepspeed_compress.session.exact import attach_exact
from deepspeed_compress.session.machines import equal_machines
from deepspeed_compress.session.observer import PolicyInputs, largest_of_all
from deepspeed_compress.session.parts import Attachment, Parts, make_parts
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.probing import Prober, WeightTraffic
from deepspeed_compress.session.protocols import IslandExchanges
from deepspeed_compress.session.session import Session
from deepspeed_compress.session.torch_version import check_torch

__all__ = ["attach", "attach_section", "detach"]

WeightBytes = Callable[[], int]
"""Function that returns the bytes that this rank sends for weights in one optimizer step."""

_ATTACH: Mapping[str, Callable[[Any, Session], WeightBytes]] = MappingProxyType(
    {"zero_0": attach_zero_0, "zero_12": attach_zero_12, "zero_3": attach_zero_3}
)
_WEIGHTS: Mapping[str, tuple[Callable[[Any], None], tuple[seams.Seam, ...]]] = MappingProxyType(
    {"zero_3": (check_weights_3, seams.WEIGHTS_3)}
)
_SEAMS: Mapping[str, tuple[seams.Seam, ...]] = MappingProxyType(
    {"zero_0": seams.ZERO_0, "zero_12": seams.ZERO_12, "zero_3": seams.ZERO_3}
)


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
    if not isinstance(engine, DeepSpeedEngine):
        raise UnsupportedError(
            f"expected a DeepSpeedEngine, got {type(engine).__name__}; use ddp.attach or fsdp2.attach for a torch "
            "model, or initialize for a model without an engine"
        )
    return attach_section(engine, parse_section(engine.config))


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
    kind = _checked(engine, config)
    missing: type[RankUnit] | None = None
    if config.islands is not None and config.islands.elastic is None and unit is None:
        missing = IslandUnit
    if config.parallelism is not None and config.parallelism.shard_within is not None and node_unit(engine) is None:
        missing = NodeUnit
    if missing is not None:
        raise ConfigError(
            f"{missing.pointer} divides ranks before an engine is made, but this engine already exists: use "
            "deepspeed_compress.initialize or install, or remove the key"
        )
    check_ownership(engine, config)
    _warn_of_single_rank_hosts(config, unit)
    patches = Patches()
    with patches.undone_on_failure():
        _attach(engine, config, unit, kind, patches)
    return engine


def _attach(engine: Any, config: CompressConfig, unit: IslandUnit | None, kind: str, patches: Patches) -> None:
    nodes = node_unit(engine)
    if nodes is not None:
        equalize_weights(engine, nodes)
    parameters = _parameters(engine, kind)
    _warn_of_unheeded_type(engine, config, parameters.dtype)
    parts = make_parts(_attachment(engine, config, parameters, kind, unit), patches)
    if unit is not None:
        patches.on_undo(functools.partial(stay_apart, engine, unit))
    differences = _difference_weights(engine, kind, parts, parameters)
    exact = None if differences is None else attach_exact(engine, differences.synchronise, patches)
    inputs = _policy_inputs(engine, parts, parameters, None if differences is None else differences.traffic())
    saving = None if config.checkpointing is None else attach_background(engine, config.checkpointing, patches)
    islands, island_files = _attach_islands(engine, unit, parameters, parts)
    session = Session(parts, inputs, exact, saving, islands)
    shards = None if nodes is None else attach_nodes(engine, nodes, session)
    weight_bytes = _no_bytes if nodes else _replace_collectives(engine, kind, session, parameters, parts.run)
    watched = Norms(engine, session.policy.skips) if session.policy.guards else None
    ended = parallel.count_parallel(engine, session.meter, patches)
    participants = (island_files, saving, CompressionState(engine, session), Resharding(engine, config))
    attach_participants(engine, [one for one in participants if one is not None], patches)
    follow_steps(Steps(engine, session, watched, weight_bytes, ended, shards))
    attach_heartbeat(engine, session)
    session.begin(engine.global_steps, loss_scale(engine))
    patches.replace(engine, "compression", session)
    if engine.global_rank == 0:
        write_configuration(session.journal, engine.config)
    announce(engine, session, parameters, kind)
    # Last, because it is collective: an earlier failure may have occurred on one rank only.
    patches.on_undo(session.renew_weights)
    patches.on_undo(session.discard_unfinished)


def _checked(engine: Any, config: CompressConfig) -> str:
    """Return the kind of `engine` (see `engine_kind`), or raise the errors of `attach`."""
    seams.check_version(deepspeed.__version__)
    check_torch(torch.__version__)
    check_world(config, dist.get_world_size(), engine.config)
    kind = engine_kind(engine)
    refuse_unsupported(engine, config)
    watched = norms.SEAMS + losses.SEAMS if config.guard is not None or config.adaptive is not None else ()
    seams.check_seams(seams.STEP + _SEAMS[kind] + parallel.SEAMS + comms_log.SEAMS + watched, deepspeed.__version__)
    if config.weights.method != "none":
        check, needed = _WEIGHTS.get(kind, (check_weights, seams.WEIGHTS))
        check(engine)
        seams.check_seams(needed, deepspeed.__version__)
    return kind


def _attachment(
    engine: Any, config: CompressConfig, parameters: Parameters, kind: str, unit: IslandUnit | None
) -> Attachment:
    # Without a guard, only loss scalers skip steps: those of DeepSpeed's own optimizers, and torch's.
    scaled = hasattr(engine.optimizer, "overflow") or engine.torch_autocast_z0_gradscaler is not None
    skips = scaled or config.guard is not None
    return Attachment(
        config,
        engine.config,
        parameters,
        engine.device,
        parallel.make_byte_report(engine),
        # Each island writes its own decisions, under the id of one common run.
        writes=dist.get_rank(deciding_group(engine)) == 0,
        make_groups=functools.partial(make_groups, engine, config),
        find_separate=functools.partial(find_separate, engine),
        transactional=skips or (kind == "zero_0" and may_begin_early(engine)),
        available=_available(engine, config, kind),
        step=engine.global_steps,
        sink=engine.monitor,
        island=None if unit is None else unit.number,
        others_listen=comms_log.listens,
    )


def _difference_weights(engine: Any, kind: str, parts: Parts, parameters: Parameters) -> Weights | None:
    """Compress the weights that the optimizer sends; None if they are not compressed, or gathered as ZeRO 3 does."""
    written = parts.config.weights
    if kind == "zero_3" or not isinstance(written, CompressedWeights):
        return None
    return attach_weights(
        engine,
        lambda settings: WeightReduction(settings, parameters, parts.run).difference_gather,
        written,
        lambda: parts.settings.weights,
        parts.patches,
    )


def _attach_islands(
    engine: Any, unit: IslandUnit | None, parameters: Parameters, parts: Parts
) -> tuple[IslandExchanges | None, Participant | None]:
    """Return the exchanges with other islands, and their participant in saving and loading; None without islands."""
    if unit is not None:
        return attach_islands(engine, unit, parameters, parts)
    if parts.config.islands is None:
        return None, None
    island = attach_elastic(engine, parameters, parts)
    return island, island


def _replace_collectives(engine: Any, kind: str, session: Session, parameters: Parameters, run: Run) -> WeightBytes:
    """Replace or count the reduction of gradients, and the gather of weights under ZeRO 3.

    Returns:
        A function that returns the bytes of weights that remain to be counted after an optimizer step.
    """
    uncounted, weights = find_limits(engine), session.config.weights
    if uncounted:
        # A single rank sends none.
        if engine.seq_data_parallel_group.size() > 1:
            _warn_uncounted(uncounted)
        return _no_bytes
    weight_bytes = _ATTACH[kind](engine, session)
    if not isinstance(weights, CompressedWeights):
        return weight_bytes
    if kind == "zero_3":
        attach_weights_3(engine, WeightReduction(weights, parameters, run), session)
        return weight_bytes
    return _no_bytes


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
        UnsupportedError: the model is sharded within nodes.
        SeamError: other code has wrapped a method since. Nothing is changed.
    """
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


def _warn_of_unheeded_type(engine: Any, config: CompressConfig, dtype: torch.dtype) -> None:
    """Warn if `communication_data_type` has no effect.

    Sums are computed in fp32 whatever the file says; uncompressed elements are sent in `dtype`.
    """
    written = engine.config.get("communication_data_type")
    if config.gradients.method != "none" and written is not None and engine.communication_data_type != dtype:
        text = (
            f'/communication_data_type: "{written}" has no effect with compressed gradients: uncompressed elements are '
            f"sent in {str(dtype).removeprefix('torch.')}, and sums are computed in fp32. Remove the key, or write "
            f'"method": "{written}" into {SECTION}.gradients'
        )
        warnings.warn(text, CompressWarning, stacklevel=4)


def _warn_of_single_rank_hosts(config: CompressConfig, unit: IslandUnit | None) -> None:
    """Warn if adaptive settings have no effect because islands by host have one data-parallel rank each.

    For islands of a given size, the warning is raised when the section is read.
    """
    by_host = config.islands is not None and config.islands.by_host
    if config.adaptive is not None and by_host and unit is not None and unit.get_data_parallel_world_size() == 1:
        text = (
            f"/{SECTION}/adaptive: has no effect, because each host has one data-parallel rank, which sends neither "
            "gradients nor weights (allowed: null); remove the key"
        )
        warnings.warn(text, CompressWarning, stacklevel=4)


def _warn_uncounted(reasons: Sequence[str]) -> None:
    """Warn that bytes are not counted in this engine.

    Only method "none" reaches this point: nothing is replaced, and unknown figures are written as 0 rather than
    estimated.
    """
    text = f"{SECTION}: bytes of gradients and weights cannot be counted in this engine, and are reported as 0: "
    warnings.warn(text + "; ".join(reasons), CompressWarning, stacklevel=4)


def _no_bytes() -> int:
    return 0


def _parameters(engine: Any, kind: str) -> Parameters:
    shapes = {name: tuple(_shape(parameter)) for parameter, name in engine.param_names.items()}
    user_names = {name: user_name(parameter, name) for parameter, name in engine.param_names.items()}
    every_name: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    # Each pipeline stage has a part of the model, so only all of them together show whether an override matches
    # nothing.
    dist.all_gather_object(every_name, list(user_names.values()))
    return Parameters(
        shapes=shapes,
        everywhere=sorted({name for some in every_name for name in some}),
        excluded=frozenset(shared_parameters(engine)),
        dtype=_RAW_DTYPE[kind](engine) if node_unit(engine) is None else engine.optimizer.gradient_accumulation_dtype,
        user_names=user_names,
    )


def _shape(parameter: Any) -> torch.Size:
    """Return the shape of the whole parameter; under ZeRO 3, this rank holds only a part."""
    return getattr(parameter, "ds_shape", parameter.shape)  # type: ignore[no-any-return]


def _available(engine: Any, config: CompressConfig, kind: str) -> AllowedChoices:
    """Return the settings that an adaptive policy may choose from.

    Under ZeRO 3 no rank keeps the weights that it gathers, so weight settings are not among them.
    """
    if config.adaptive is None:
        return AllowedChoices()
    return AllowedChoices(low_rank=equal_machines(engine.device, deciding_group(engine)), weights=kind != "zero_3")


def _policy_inputs(
    engine: Any, parts: Parts, parameters: Parameters, weights: WeightTraffic | None
) -> PolicyInputs | None:
    if not parts.policy.observes:
        return None
    prober, group = None, deciding_group(engine)
    if parts.policy.adaptation is not None:
        prober = Prober(parts.policy.adaptation.adaptive, parameters, engine.device, group, weights)
    largest = functools.partial(largest_of_all, device=engine.device, group=group)
    return PolicyInputs(follow_losses(engine, parts.patches), largest, prober)


_RAW_DTYPE: Mapping[str, Callable[[Any], torch.dtype]] = MappingProxyType(
    {
        # The bf16 optimizer reduces gradients in its gradient accumulation dtype.
        "zero_0": lambda engine: engine.get_data_types()[isinstance(engine.optimizer, BF16_Optimizer)],
        "zero_12": lambda engine: engine.communication_data_type,
        "zero_3": lambda engine: engine.get_data_types()[0],
    }
)
"""Dtype of the gradients in DeepSpeed's buckets. Uncompressed elements are sent in it, so they are not rounded."""
