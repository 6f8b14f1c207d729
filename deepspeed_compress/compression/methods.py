"""From the settings of a method to its compressor: one row a method."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import (
    FP8,
    QSGD,
    BlockTopK,
    Blockwise,
    Cast,
    Compressor,
    Linear,
    Percentile,
    RandomK,
    Sign,
    TopK,
)
from deepspeed_compress.compression.transforms import DCT, Hadamard, Identity, Transform

__all__ = ["DTYPES", "METHODS", "codec_at", "compressor_from"]

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)


def compressor_from(method: Any, density: float | None = None) -> Compressor:
    """The compressor of a method's settings (a model of `config.methods` or `config.places`).

    `density` stands in for the one of the settings; what is not sparse has none.
    """
    return METHODS[method.method](method, getattr(method, "density", 1.0) if density is None else density)


def codec_at(method: Any, widths: Mapping[str, int], step: int) -> Codec:
    """What `method` does in optimizer step `step` (0-based). `widths`: row length of each matrix, by its name."""
    density = density_at(step, method.density, method.density_warmup_steps) if hasattr(method, "density") else None
    return Codec(compressor_from(method, density), _transform(method, widths))


def density_at(step: int, density: float, warmup_steps: int) -> float:
    """25 %, 6.25 %, 1.56 % ... in stages of a quarter of the warm-up, never below `density`.

    Deep Gradient Compression (arXiv:1712.01887, section 3.3) falls by the same factor each epoch.
    """
    stage = 4 * step // warmup_steps if step < warmup_steps else None
    return density if stage is None else max(density, 0.25 ** (stage + 1))


def _transform(method: Any, widths: Mapping[str, int]) -> Transform:
    if method.method == "demo":
        return DCT(widths, method.tile)
    rotation = getattr(method, "rotation", None)
    return _TRANSFORMS[rotation.method](rotation, widths) if rotation is not None else Identity()


_TRANSFORMS: Mapping[str, Callable[[Any, Mapping[str, int]], Transform]] = MappingProxyType(
    {
        "hadamard": lambda rotation, widths: Hadamard(rotation.block_size),
        "dct": lambda rotation, widths: DCT(widths, rotation.tile),
    }
)


def _values(method: Any) -> Compressor:
    return Cast(torch.float32) if method.values is None else compressor_from(method.values)


def _blockwise(method: Any, _: float) -> Compressor:
    return Blockwise(method.bits, method.block_size, method.rounding == "stochastic", DTYPES[method.scale_dtype])


def _linear(method: Any, _: float) -> Compressor:
    stochastic = method.method == "stochastic_linear"
    return Linear(method.bits, method.block_size, stochastic, DTYPES[method.scale_dtype])


def _percentile(method: Any, _: float) -> Compressor:
    return Percentile(method.bits, method.block_size, method.percentile, method.rounding == "stochastic")


def _fp8(method: Any, _: float) -> Compressor:
    return FP8(method.method.removeprefix("fp8_"), method.block_size)


def _topk(method: Any, density: float) -> Compressor:
    return TopK(density, method.block_size, _values(method), method.scope, method.min_magnitude)


def _demo(method: Any, density: float) -> Compressor:
    return TopK(density, method.tile**2, _values(method))


def _randomk(method: Any, density: float) -> Compressor:
    return RandomK(density, method.block_size, _values(method), method.rescale)


def _block_topk(method: Any, density: float) -> Compressor:
    return BlockTopK(density, method.block_size, method.group, _values(method))


METHODS: Mapping[str, Callable[[Any, float], Compressor]] = MappingProxyType(
    {
        "bf16": lambda method, _: Cast(torch.bfloat16),
        "fp16": lambda method, _: Cast(torch.float16),
        "blockwise": _blockwise,
        "linear": _linear,
        "stochastic_linear": _linear,
        "percentile": _percentile,
        "qsgd": lambda method, _: QSGD(method.levels, method.block_size),
        "fp8_e4m3": _fp8,
        "fp8_e5m2": _fp8,
        "sign": lambda method, _: Sign(method.block_size),
        "topk": _topk,
        "randomk": _randomk,
        "block_topk": _block_topk,
        "dgc": _topk,
        "demo": _demo,
    }
)
"""By the `method` of the configuration. "none" and "powersgd" are no compressors: `build` knows what they are."""
