"""Blockwise quantization to 8, 4, 3 or 2 bits with one scale per block."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deepspeed_compress.compression.compressors.blocks import FormQuantizer
from deepspeed_compress.compression.kernels.forms import LEVELS, BlockFormat

_FITTED: Mapping[int, str] = {2: "lloyd", 3: "eight"}
"""Kinds of `BlockFormat` with fitted levels, for bit widths at which levels scaled by max|x| are too coarse."""


@dataclass(frozen=True)
class Blockwise(FormQuantizer):
    """Blockwise quantization: q = round(x / s) with s = max|x| / (2**(bits-1) - 1) for each block.

    Source: block-wise quantization of Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
    (arXiv:2110.02861, section 2.1), with linear symmetric levels.

    - 2 bits, stochastic: the same formula, which is TernGrad (Wen et al., arXiv:1705.07878, section 3) on blocks.
    - 2 bits, nearest: three levels scaled by max|x| would lose most of a block. There are four levels instead, -4s, -s,
      s and 4s, with s fitted to the block by two iterations of Lloyd's algorithm (IEEE Trans. Inf. Theory 28, 1982): s
      minimizes the squared error for the chosen levels, and then each element takes its nearest level. The relative
      squared errors on blocks of 256 normal / Laplace distributed elements are 0.12 / 0.18, compared with 0.65 / 0.69
      for max|x| and 0.19 / 0.28 for the ternary form of Li and Liu (arXiv:1605.04711). No level is zero: an element
      that is 0 becomes s, unless the whole block is 0.
    - 3 bits, nearest: for the same reason there are eight levels, -10s, -6s, -3s, -s, s, 3s, 6s and 10s, with s fitted
      by one iteration that starts from a third of mean |x|. The relative squared errors are 0.039 / 0.060, compared
      with 0.088 / 0.157 for max|x| with seven levels.

    A 16-bit scale (`scale_dtype`) is rounded before the codes are computed. If rounding makes it smaller, the largest
    elements are clipped by up to 2**-8 (bf16) or 2**-11 (fp16) of their magnitude, so stochastic rounding is unbiased
    with fp32 scales only. With fp16 scales, blocks are clipped at 65504, and blocks below 2**-25 become 0.

    Payload: see `BlockQuantizer`. Codes are in two's complement. Codes of four levels have bit 2 for the sign plus 1
    for an outer level; codes of eight levels have bit 4 for the sign plus 0 to 3.
    """

    bits: int = 8
    block_size: int = 256
    stochastic: bool = False
    scale_dtype: torch.dtype = torch.float32

    @property
    def levels(self) -> int:
        """Return the largest code in two's complement."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    def form(self) -> BlockFormat:
        kind = None if self.stochastic else _FITTED.get(self.bits)
        if kind is not None:
            return BlockFormat(kind, LEVELS[kind].magnitudes[-1], self.bits, self.block_size)
        return BlockFormat("absmax", self.levels, self.bits, self.block_size)
