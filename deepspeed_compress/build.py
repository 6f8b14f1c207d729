"""From the configuration to reducers: the only place that knows both."""

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from deepspeed_compress.compressors import Blockwise, Cast, Compressor, TopK
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.feedback import Residuals, WithFeedback, WithoutFeedback
from deepspeed_compress.monitor import Meter
from deepspeed_compress.reducers import Encoder, PayloadReducer, StepClock

__all__ = ["Reduction", "build_reduction", "compressor_from"]

_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)

RAW, COMPRESSED = 0, 1
"""Codecs of a message: elements in their own dtype, and the method that the user chose."""


@dataclass(frozen=True)
class Reduction:
    """Everything that gradient reduction needs: the reducer in force later, the plain one, and their shared state."""

    compressed: PayloadReducer
    plain: PayloadReducer
    residuals: Mapping[str, Residuals]
    """By the direction that they belong to: "gradients", "means"."""
    clock: StepClock
    meter: Meter


def compressor_from(method: Any) -> Compressor:
    """The compressor of a method's configuration (a member of `GradientsConfig` or `ValuesConfig`)."""
    return _BUILDERS[method.method](method)


def _blockwise(method: Any) -> Compressor:
    return Blockwise(method.bits, method.block_size, method.rounding == "stochastic")


def _topk(method: Any) -> Compressor:
    values = Cast(torch.float32) if method.values is None else compressor_from(method.values)
    return TopK(method.density, method.block_size, values)


_BUILDERS: Mapping[str, Callable[[Any], Compressor]] = MappingProxyType(
    {
        "bf16": lambda method: Cast(torch.bfloat16),
        "fp16": lambda method: Cast(torch.float16),
        "blockwise": _blockwise,
        "topk": _topk,
    }
)


def build_reduction(
    config: CompressConfig,
    group: ProcessGroup,
    parameters: Sequence[str],
    exempt: Sequence[str],
    raw_dtype: torch.dtype,
    transactional: bool,
) -> Reduction:
    """Reducers for a method other than "none".

    `parameters`: names of all parameters; `exempt`: those that must go uncompressed whatever the configuration says.
    `raw_dtype`: dtype of the gradients, in which uncompressed elements travel. `transactional`: the optimizer may skip
    a step. Warns of an override that matches no parameter.
    """
    clock, meter = StepClock(), Meter()
    raw = WithoutFeedback(Cast(raw_dtype))
    compressor = compressor_from(config.gradients)
    feedback = config.gradients.error_feedback  # type: ignore[union-attr]
    residuals: dict[str, Residuals] = {}

    def encoder(direction: str) -> Encoder:
        if feedback is None:
            return WithoutFeedback(compressor)
        residuals[direction] = Residuals(_DTYPES[feedback.dtype], transactional)
        return WithFeedback(compressor, residuals[direction])

    codec_of = _codec_of(config, parameters, exempt)
    compressed = PayloadReducer(
        group, (raw, encoder("gradients")), (raw, encoder("means")), codec_of, clock, meter, config.seed
    )
    plain = PayloadReducer(group, (raw,), (raw,), lambda name: RAW, clock, meter, config.seed)
    return Reduction(compressed, plain, MappingProxyType(residuals), clock, meter)


def _codec_of(config: CompressConfig, parameters: Sequence[str], exempt: Sequence[str]) -> Callable[[str], int]:
    """Parameter name to codec; overrides choose `none`, the only method that they know in this version."""
    overrides = config.gradients.overrides  # type: ignore[union-attr]
    for index, override in enumerate(overrides):
        if parameters and not any(re.search(override.parameters, name) for name in parameters):
            warnings.warn(
                f"/deepspeed_compress/gradients/overrides/{index}/parameters: {override.parameters!r} matches none of "
                f"the {len(parameters)} parameters on this rank (for example {parameters[0]!r}), so it has no effect; "
                "write a regular expression that is found in their names, or remove the override",
                CompressWarning,
                stacklevel=3,
            )
    raw = {name for name in parameters if any(re.search(override.parameters, name) for override in overrides)}
    raw.update(exempt)
    return lambda name: RAW if name in raw else COMPRESSED
