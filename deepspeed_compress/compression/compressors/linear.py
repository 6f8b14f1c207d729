"""Blockwise quantization between the smallest and the largest element."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.blocks import RowQuantizer
from deepspeed_compress.compression.kernels import for_device

__all__ = ["Linear"]


@dataclass(frozen=True)
class Linear(RowQuantizer):
    """q = round((x - lo) / (hi - lo) * (2**bits - 1)), lo and hi the extremes of each block of `block_size` elements.

    Source: affine (asymmetric) quantization, Jacob et al. (arXiv:1712.05877, section 2.1), with the real numbers lo and
    hi in place of a zero point, so that both extremes are exact; zero is a level only by chance. Rounding is to nearest
    even, or if `stochastic` to floor(... + u), u uniform in [0, 1), which is unbiased (Suresh et al., "Distributed Mean
    Estimation with Limited Communication", arXiv:1611.00429, section 2.2).

    lo and hi of 16 bits (`scale_dtype`) are rounded before the codes are taken; what is then outside of them is
    clipped, so stochastic rounding is unbiased with fp32 alone. Blocks of equal elements keep their value, rounded to
    that dtype. fp16 clips what is beyond 65504.

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
        """Rounded to `scale_dtype`, finite ones to its largest number at most; still fp32."""
        largest = torch.finfo(self.scale_dtype).max
        rounded = extremes.clamp(-largest, largest).to(self.scale_dtype).to(torch.float32)
        return torch.where(extremes.isfinite(), rounded, extremes)

    def _dequantize_add(self, numbers: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
        # A mean of lo and hi cannot overflow, as lo + q * step can.
        share = codes / self.levels
        low, high = numbers.unsqueeze(2).unbind(dim=1)
        out.add_(low * (1 - share) + high * share, alpha=scale)
