"""What a quantization kernel is told: the form of blocks and codes, and the memory of error feedback."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["LEVELS", "OUTER", "TRITS", "BlockFormat", "FittedLevels", "ResidualBuffers", "fitted", "scale_limit"]

TRITS = 5
"""Codes of three values in a byte: 3**5 = 243 of its 256 values."""


@dataclass(frozen=True)
class FittedLevels:
    """`magnitudes` of levels in units of the scale, ascending. The fit of the scale begins at `start` times mean |x|
    and takes so many `iterations`."""

    magnitudes: tuple[int, ...]
    start: float
    iterations: int

    @property
    def borders(self) -> tuple[float, ...]:
        """Where the next level becomes the nearer one, in units of the scale."""
        return tuple((low + high) / 2 for low, high in zip(self.magnitudes, self.magnitudes[1:], strict=False))


# Ratios between the best ones for normal and for Laplace distributed elements (Lloyd, Max): errors of both stay within
# a sixth of what is possible. The starts lie between as well.
LEVELS: Mapping[str, FittedLevels] = MappingProxyType(
    {
        "ternary": FittedLevels((0, 1), 1.5, iterations=1),
        "lloyd": FittedLevels((1, 4), 0.5, iterations=2),
        "eight": FittedLevels((1, 3, 6, 10), 1 / 3, iterations=1),
    }
)
"""The kinds of `BlockFormat` whose scale is fitted."""
OUTER = LEVELS["lloyd"].magnitudes[-1]
"""The outer of the four levels of kind "lloyd", in units of the scale."""


@dataclass(frozen=True)
class BlockFormat:
    """Blocks of `block_size` elements, the last one shorter; a scale s a block, a code of `bits` bits an element.

    Kinds: "absmax": s = max|x| / `levels`, codes round(x / s) in two's complement. "norm": s = ||x||_2 / `levels`,
    codes as of "absmax". "mean": s = mean |x|, the code is 1 for x >= 0 (1 bit). "lloyd": the levels -4s, -s, s,
    4s, with s fitted by two iterations of Lloyd's algorithm; the code is 2 for x >= 0, plus 1 if outer (2 bits).
    "eight": levels of s, 3s, 6s and 10s, one iteration; the code is 4 for x >= 0, plus 0 to 3 (3 bits). "ternary": the
    levels -s, 0, s, one iteration; the code is 0, 1 or 2, and `TRITS` codes of a block are digits of a byte, the first
    the lowest (`bits`, 2, is what a code takes by itself). `levels` is the largest magnitude of a code.
    """

    kind: str
    levels: int
    bits: int
    block_size: int

    def code_bytes(self, numel: int) -> int:
        """Of the packed codes of `numel` elements."""
        if self.kind != "ternary":
            return -(-numel * self.bits // 8)
        whole, rest = divmod(numel, self.block_size)
        return whole * -(-self.block_size // TRITS) + -(-rest // TRITS)


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
