"""Parameters of the quantization kernels: the format of blocks and codes, and the error-feedback buffers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

TRITS = 5
"""Number of ternary codes per byte: 3**5 = 243 of its 256 values."""


@dataclass(frozen=True)
class FittedLevels:
    """Levels whose scale is fitted to the elements.

    Attributes:
        magnitudes: magnitudes of the levels in units of the scale, ascending.
        start: initial scale, in units of mean |x|.
        iterations: number of iterations of the fit.
    """

    magnitudes: tuple[int, ...]
    start: float
    iterations: int

    @property
    def borders(self) -> tuple[float, ...]:
        """Return the thresholds between neighboring levels, in units of the scale."""
        return tuple((low + high) / 2 for low, high in zip(self.magnitudes, self.magnitudes[1:], strict=False))


# A compromise between the optimal ratios for normal and for Laplace distributed elements (Lloyd, Max): for both, the
# error is within a sixth of the optimum. The initial scales are a compromise as well.
LEVELS: Mapping[str, FittedLevels] = {
    "ternary": FittedLevels((0, 1), 1.5, iterations=1),
    "lloyd": FittedLevels((1, 4), 0.5, iterations=2),
    "eight": FittedLevels((1, 3, 6, 10), 1 / 3, iterations=1),
}
"""Levels of the kinds of `BlockFormat` whose scale is fitted."""
OUTER = LEVELS["lloyd"].magnitudes[-1]
"""Magnitude of the outer levels of kind "lloyd", in units of the scale."""


@dataclass(frozen=True)
class BlockFormat:
    """Format of blocks of `block_size` elements (the last one may be shorter), with one scale s per block.

    Each element has a code of `bits` bits. `levels` is the largest magnitude of a code. Kinds:

    - "absmax": s = max|x| / `levels`; codes are round(x / s) in two's complement.
    - "norm": s = ||x||_2 / `levels`; codes as for "absmax".
    - "mean": s = mean |x|; the code is 1 for x >= 0 (1 bit).
    - "lloyd": levels -4s, -s, s and 4s, with s fitted by two iterations of Lloyd's algorithm; the code is 2 for x >= 0,
      plus 1 for an outer level (2 bits).
    - "eight": levels of magnitude s, 3s, 6s and 10s, one iteration; the code is 4 for x >= 0, plus 0 to 3 (3 bits).
    - "ternary": levels -s, 0 and s, one iteration; the code is 0, 1 or 2. `TRITS` codes of a block are the digits of a
      byte, lowest first (`bits` is 2, the size of a single code).
    """

    kind: str
    levels: int
    bits: int
    block_size: int

    def code_bytes(self, numel: int) -> int:
        """Return the size in bytes of the packed codes of `numel` elements."""
        if self.kind != "ternary":
            return -(-numel * self.bits // 8)
        whole, rest = divmod(numel, self.block_size)
        return whole * -(-self.block_size // TRITS) + -(-rest // TRITS)


@dataclass(frozen=True)
class ResidualBuffers:
    """Error-feedback buffers of a message: flat fp32 or bf16, as long as the message.

    Attributes:
        before: residual that is added to the message, times `decay`.
        decay: factor of `before`.
        after: buffer for the new residual. May be `before` itself.
    """

    before: Tensor
    decay: float
    after: Tensor

    def part(self, begin: int, end: int) -> "ResidualBuffers":
        """Return the buffers of the elements from `begin` to `end`."""
        return ResidualBuffers(self.before[begin:end], self.decay, self.after[begin:end])


def scale_limit(dtype: torch.dtype, levels: int = 1) -> float:
    """Return the largest scale of `dtype` that, multiplied by `levels`, stays within the range of bf16."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.bfloat16).max / levels)


def fitted(scales: Tensor, dtype: torch.dtype, levels: int = 1) -> Tensor:
    """Return `scales` (fp32 or fp64, >= 0) as the receiver sees them: rounded to `dtype`, as fp32.

    A finite scale stays finite, and so does `levels` times it: larger scales become the largest number of `dtype`, or
    that of bf16 divided by `levels`. Infinity and NaN are kept. Small scales may become 0.
    """
    rounded = scales.clamp(max=scale_limit(dtype, levels)).to(dtype).to(torch.float32)
    return torch.where(scales.isfinite(), rounded, scales.to(torch.float32))
