"""Blockwise quantization to 8, 4 or 2 bits with one scale a block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compressors.blocks import SymmetricQuantizer, fitted
from deepspeed_compress.kernels import for_device

__all__ = ["Blockwise"]

_OUTER = 4
"""The outer of the four levels of 2 bits, in units of the scale."""
_ITERATIONS = 2


@dataclass(frozen=True)
class Blockwise(SymmetricQuantizer):
    """q = round(x / s) with s = max|x| / (2**(bits-1) - 1) over each block of `block_size` elements.

    Source: block-wise quantization of Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
    (arXiv:2110.02861, section 2.1), with linear symmetric levels.

    2 bits, stochastic: the same, which is TernGrad (Wen et al., arXiv:1705.07878, section 3) on blocks.
    2 bits to nearest: the three levels of max|x| would lose most of a block, so there are four, -4s, -s, s, 4s, with
    s fitted to the block by two iterations of Lloyd's algorithm (IEEE Trans. Inf. Theory 28, 1982): s minimizes the
    squared error given the levels chosen, then each element takes the level nearest to it. Relative squared errors on
    blocks of 256 normal / Laplace distributed elements: 0.12 / 0.18, against 0.65 / 0.69 for max|x| and 0.19 / 0.28
    for the ternary form of Li and Liu (arXiv:1605.04711). There is no level at zero: an element that is 0 becomes s,
    unless the whole block is 0.

    A scale of 16 bits (`scale_dtype`) is rounded before the codes are taken. If that makes it smaller, the largest
    elements are clipped, by up to 2**-8 (bf16) or 2**-11 (fp16) of their magnitude, so stochastic rounding is unbiased
    with fp32 scales only. fp16 ends at 65504, where blocks are clipped, and at 2**-25, below which they become 0.

    Payload: see `BlockQuantizer`. Codes are two's complement; the four levels have 2 for the sign plus 1 if outer.
    """

    bits: int = 8
    block_size: int = 256
    stochastic: bool = False
    scale_dtype: torch.dtype = torch.float32

    @property
    def code_bits(self) -> int:
        return self.bits

    @property
    def levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    @property
    def _four_levels(self) -> bool:
        return self.bits == 2 and not self.stochastic

    def _scales(self, rows: Tensor) -> Tensor:
        return fitted(rows.abs().amax(dim=1).div_(self.levels), self.scale_dtype, self.levels)

    def _quantize(self, rows: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        if not self._four_levels:
            return super()._quantize(rows, noise)
        magnitudes = rows.abs()
        scales = fitted(_lloyd(magnitudes), self.scale_dtype, _OUTER).unsqueeze(1)
        return scales, (rows >= 0).to(torch.uint8).mul_(2).add_(_is_outer(magnitudes, scales))

    def _dequantize_add(self, numbers: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
        if not self._four_levels:
            super()._dequantize_add(numbers, codes, out, scale)
            return
        signed = ((codes & 1) * (_OUTER - 1) + 1).view(torch.int8) * ((codes & 2).view(torch.int8) - 1)
        for_device(out.device).dequantize_rows_add(numbers.squeeze(1), signed, out, scale)


def _is_outer(magnitudes: Tensor, scales: Tensor) -> Tensor:
    """Whether each of `magnitudes` [r, b] is nearer to the outer level: bool. `scales`: [r, 1]."""
    return magnitudes >= scales * ((1 + _OUTER) / 2)


def _lloyd(magnitudes: Tensor) -> Tensor:
    """The scale of the four levels of each row of `magnitudes` (fp32 [r, b]): fp64 [r].

    Sums are fp64, which nothing can overflow and which the order of summation does not show in.
    """
    width, total = magnitudes.shape[1], magnitudes.sum(dim=1, dtype=torch.float64)
    # The best scale for normal and Laplace distributed elements is about half of the mean magnitude.
    scales = total / (2 * width)
    for _ in range(_ITERATIONS):
        outer = _is_outer(magnitudes, scales.to(torch.float32).unsqueeze(1))
        outer_total = (magnitudes * outer).sum(dim=1, dtype=torch.float64)
        # Counting in fp32 is exact, and much faster than in int64.
        outer_count = outer.sum(dim=1, dtype=torch.float32)
        scales = (total + (_OUTER - 1) * outer_total) / (width + (_OUTER**2 - 1) * outer_count)
    return scales
