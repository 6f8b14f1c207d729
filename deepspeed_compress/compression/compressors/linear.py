"""Blockwise affine quantization between the smallest and the largest element."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.blocks import RowQuantizer
from deepspeed_compress.compression.kernels import for_device


@dataclass(frozen=True)
class Linear(RowQuantizer):
    """Affine quantization: q = round((x - lo) / (hi - lo) * (2**bits - 1)), with lo and hi the extremes of each block.

    Source: affine (asymmetric) quantization, Jacob et al. (arXiv:1712.05877, section 2.1), with real numbers lo and hi
    in place of a zero point, so both extremes are exact; zero is a level only by chance. Rounding is to nearest even.
    If `stochastic`, it is floor(... + u) with u uniform in [0, 1), which is unbiased (Suresh et al., "Distributed Mean
    Estimation with Limited Communication", arXiv:1611.00429, section 2.2).

    With a 16-bit `scale_dtype`, lo and hi are rounded before the codes are computed, and elements outside of them are
    clipped, so stochastic rounding is unbiased with fp32 only. A block of equal elements keeps its value, rounded to
    that dtype. fp16 clips values beyond 65504.

    Payload: see `BlockQuantizer`; the numbers of a block are lo and hi.
    """

    numbers: ClassVar[int] = 2
    bits: int = 8
    block_size: int = 256
    stochastic: bool = False
    scale_dtype: torch.dtype = torch.float32

    @property
    def code_bits(self) -> int:
        return self.bits

    @property
    def levels(self) -> int:
        return int(2**self.bits) - 1

    def _quantize(self, rows: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        extremes = self._as_sent(torch.stack(rows.aminmax(dim=1), dim=1))
        low, high = extremes.unbind(dim=1)
        return extremes, for_device(rows.device).quantize_rows_between(rows, low, high, self.levels, noise)

    def _as_sent(self, extremes: Tensor) -> Tensor:
        """Return `extremes` rounded to `scale_dtype`, as fp32; finite values saturate."""
        largest = torch.finfo(self.scale_dtype).max
        rounded = extremes.clamp(-largest, largest).to(self.scale_dtype).to(torch.float32)
        return torch.where(extremes.isfinite(), rounded, extremes)

    def _dequantize_add(self, numbers: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
        # A weighted mean of lo and hi cannot overflow; lo + q * step can.
        share = codes / self.levels
        low, high = numbers.unsqueeze(2).unbind(dim=1)
        out.add_(low * (1 - share) + high * share, alpha=scale)
