"""Description of an engine for the parts of its session."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from deepspeed_compress.backends.deepspeed import comms_log, parallel
from deepspeed_compress.backends.deepspeed.gradients.zero_0 import may_begin_early
from deepspeed_compress.backends.deepspeed.groups import find_separate, make_groups
from deepspeed_compress.backends.deepspeed.limits import engine_kind, shared_parameters
from deepspeed_compress.backends.deepspeed.node_gradients import may_average_early
from deepspeed_compress.backends.deepspeed.units import IslandUnit, deciding_group, node_unit
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.config.names import user_name
from deepspeed_compress.policy import AllowedChoices
from deepspeed_compress.session.machines import equal_machines
from deepspeed_compress.session.parts import Attachment


def find_parameters(engine: Any) -> Parameters:
    """Return the model's parameters as reducers know them. Collective."""
    shapes = {name: tuple(_shape(parameter)) for parameter, name in engine.param_names.items()}
    user_names = {name: user_name(parameter, name) for parameter, name in engine.param_names.items()}
    # Each pipeline stage has a part of the model, so only all of them together show whether an override matches
    # nothing.
    trained = {engine.param_names[parameter] for parameter in _trained(engine)}
    every_name = gather_objects([user_names[name] for name in user_names if name in trained])
    in_nodes = node_unit(engine) is not None
    dtype = engine.optimizer.gradient_accumulation_dtype if in_nodes else _RAW_DTYPE[engine_kind(engine)](engine)
    return Parameters(
        shapes=shapes,
        everywhere=sorted({name for some in every_name for name in some}),
        excluded=frozenset(shared_parameters(engine)),
        dtype=dtype,
        user_names=user_names,
        frozen=frozenset(engine.param_names.values()) - trained,
    )


def _trained(engine: Any) -> Iterator[Any]:
    """Yield the parameters whose gradients are reduced: those that ZeRO has taken, or all that require gradients."""
    groups = _TRAINED.get(engine_kind(engine))
    if groups is not None:
        return (parameter for group in getattr(engine.optimizer, groups) for parameter in group)
    return (parameter for parameter in engine.param_names if parameter.requires_grad)


_TRAINED: Mapping[str, str] = {"zero_12": "bit16_groups", "zero_3": "fp16_groups"}
"""Attribute of DeepSpeed's optimizer with its groups of trained parameters, by kind of engine."""


def describe(engine: Any, config: CompressConfig, island: IslandUnit | None, parameters: Parameters) -> Attachment:
    """Return the description of the engine and of this rank from which the session's parts are made.

    Args:
        engine: the engine.
        config: the section.
        island: this rank's island, if the ranks of this job were divided into islands; None otherwise.
        parameters: the model's parameters.
    """
    # Without a guard, only loss scalers skip steps: those of DeepSpeed's own optimizers, and torch's.
    scaled = hasattr(engine.optimizer, "overflow") or engine.torch_autocast_z0_gradscaler is not None
    skips = scaled or config.guard is not None
    in_nodes, without_zero = node_unit(engine) is not None, engine_kind(engine) == "zero_0"
    overlaps = may_average_early(engine) if in_nodes else without_zero and may_begin_early(engine)
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
        available=_available(engine, config),
        step=engine.global_steps,
        sink=engine.monitor,
        island=None if island is None else island.number,
        others_listen=comms_log.listens,
    )


def _shape(parameter: Any) -> torch.Size:
    """Return the shape of the whole parameter; under ZeRO 3, this rank holds only a part."""
    return getattr(parameter, "ds_shape", parameter.shape)  # type: ignore[no-any-return]


def _available(engine: Any, config: CompressConfig) -> AllowedChoices:
    """Return the settings that an adaptive policy may choose from.

    Under ZeRO 3 no rank keeps the weights that it gathers, so weight settings are not among them.
    """
    if config.adaptive is None:
        return AllowedChoices()
    low_rank = equal_machines(engine.device, deciding_group(engine))
    return AllowedChoices(low_rank, weights=engine_kind(engine) != "zero_3")


_RAW_DTYPE: Mapping[str, Callable[[Any], torch.dtype]] = {
    # The bf16 optimizer reduces gradients in its gradient accumulation dtype.
    "zero_0": lambda engine: engine.get_data_types()[isinstance(engine.optimizer, BF16_Optimizer)],
    "zero_12": lambda engine: engine.communication_data_type,
    "zero_3": lambda engine: engine.get_data_types()[0],
}
"""Dtype of the gradients in DeepSpeed's buckets. Uncompressed elements are sent in it, so they are not rounded."""
