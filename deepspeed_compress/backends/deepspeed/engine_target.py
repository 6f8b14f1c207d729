"""Target of `attach`: an engine, and what the session's parts must know about it."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from deepspeed_compress.backends.deepspeed import comms_log, parallel
from deepspeed_compress.backends.deepspeed.gradients.zero_0 import may_begin_early
from deepspeed_compress.backends.deepspeed.groups import find_separate, make_groups
from deepspeed_compress.backends.deepspeed.limits import shared_parameters
from deepspeed_compress.backends.deepspeed.node_gradients import may_average_early
from deepspeed_compress.backends.deepspeed.units import IslandUnit, NodeUnit, deciding_group
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.config.names import user_name
from deepspeed_compress.policy import AllowedChoices
from deepspeed_compress.session.machines import equal_machines
from deepspeed_compress.session.parts import Attachment


@dataclass(frozen=True)
class EngineTarget:
    """An engine to attach to.

    Attributes:
        engine: the engine.
        config: the section.
        kind: the result of `engine_kind`.
        island: this rank's island, if the ranks of this job were divided into islands; None otherwise.
        node: this rank's node, if the model is sharded within nodes; None otherwise.
    """

    engine: Any
    config: CompressConfig
    kind: str
    island: IslandUnit | None
    node: NodeUnit | None


def find_parameters(target: EngineTarget) -> Parameters:
    """Return the model's parameters as reducers know them. Collective."""
    engine = target.engine
    shapes = {name: tuple(_shape(parameter)) for parameter, name in engine.param_names.items()}
    user_names = {name: user_name(parameter, name) for parameter, name in engine.param_names.items()}
    # Each pipeline stage has a part of the model, so only all of them together show whether an override matches
    # nothing.
    every_name = gather_objects(list(user_names.values()))
    dtype = _RAW_DTYPE[target.kind](engine) if target.node is None else engine.optimizer.gradient_accumulation_dtype
    return Parameters(
        shapes=shapes,
        everywhere=sorted({name for some in every_name for name in some}),
        excluded=frozenset(shared_parameters(engine)),
        dtype=dtype,
        user_names=user_names,
    )


def describe(target: EngineTarget, parameters: Parameters) -> Attachment:
    """Return the description of the engine and of this rank from which the session's parts are made."""
    engine, config, kind = target.engine, target.config, target.kind
    # Without a guard, only loss scalers skip steps: those of DeepSpeed's own optimizers, and torch's.
    scaled = hasattr(engine.optimizer, "overflow") or engine.torch_autocast_z0_gradscaler is not None
    skips = scaled or config.guard is not None
    overlaps = may_average_early(engine) if target.node else kind == "zero_0" and may_begin_early(engine)
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
        transactional=skips or overlaps,
        available=_available(target),
        step=engine.global_steps,
        sink=engine.monitor,
        island=None if target.island is None else target.island.number,
        others_listen=comms_log.listens,
    )


def _shape(parameter: Any) -> torch.Size:
    """Return the shape of the whole parameter; under ZeRO 3, this rank holds only a part."""
    return getattr(parameter, "ds_shape", parameter.shape)  # type: ignore[no-any-return]


def _available(target: EngineTarget) -> AllowedChoices:
    """Return the settings that an adaptive policy may choose from.

    Under ZeRO 3 no rank keeps the weights that it gathers, so weight settings are not among them.
    """
    if target.config.adaptive is None:
        return AllowedChoices()
    engine = target.engine
    return AllowedChoices(
        low_rank=equal_machines(engine.device, deciding_group(engine)), weights=target.kind != "zero_3"
    )


_RAW_DTYPE: Mapping[str, Callable[[Any], torch.dtype]] = {
    # The bf16 optimizer reduces gradients in its gradient accumulation dtype.
    "zero_0": lambda engine: engine.get_data_types()[isinstance(engine.optimizer, BF16_Optimizer)],
    "zero_12": lambda engine: engine.communication_data_type,
    "zero_3": lambda engine: engine.get_data_types()[0],
}
"""Dtype of the gradients in DeepSpeed's buckets. Uncompressed elements are sent in it, so they are not rounded."""
