"""What a quantization kernel is told: the form of blocks and codes, and the memory of error feedback."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["OUTER", "BlockFormat", "ResidualBuffers", "fitted", "scale_limit"]

OUTER = 4
"""The outer of the four levels of kind "lloyd", in units of the scale."""


@dataclass(frozen=True)
class BlockFormat:
    """Blocks of `block_size` elements, the last one shorter; a scale s a block, a code of `bits` bits an element.

    Kinds: "absmax": s = max|x| / `levels`, codes round(x / s) in two's complement. "norm": s = ||x||_2 / `levels`,
    codes as of "absmax". "mean": s = mean |x|, the code is 1 for x >= 0 (1 bit). "lloyd": the levels -4s, -s, s,
    4s, with s fitted by two iterations of Lloyd's algorithm; the code is 2 for x >= 0, plus 1 if outer (2 bits).
    `levels` is the largest magnitude of a code.
    """

    kind: str
    levels: int
    bits: int
    block_size: int


@dataclass(frozen=True)
class ResidualBuffers:
    """What is added to a message, and where what it leaves out goes: flat fp32 or bf16, as long as the message.

    `before` is added times `decay`. `after` may be `before` itself.
    """

    before: Tensor
    decay: float
    after: Tensor


def scale_limit(dtype: torch.dtype, levels: int = 1) -> float:
    """The largest finite scale of `dtype` that `levels` multiply to a number of the range of bf16."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.bfloat16).max / levels)


def fitted(scales: Tensor, dtype: torch.dtype, levels: int = 1) -> Tensor:
    """`scales` (fp32 or fp64, >= 0) as the receiver sees them: rounded to `dtype`, as fp32.

    A finite scale stays finite, and so does `levels` times it: what is too large becomes the largest number of `dtype`,
    or that of bf16 divided by `levels`. Infinity and NaN stay. Small ones may become 0.
    """
    rounded = scales.clamp(max=scale_limit(dtype, levels)).to(dtype).to(torch.float32)
    return torch.where(scales.isfinite(), rounded, scales.to(torch.float32))
