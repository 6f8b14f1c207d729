"""Blockwise quantization with the largest elements clipped."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.blocks import SymmetricQuantizer
from deepspeed_compress.compression.kernels.forms import fitted


@dataclass(frozen=True)
class Percentile(SymmetricQuantizer):
    """Clipped quantization: q = round(x / s) with s = p / (2**(bits-1) - 1), and p a percentile of |x| in the block.

    Source: percentile calibration of McKinstry et al. (arXiv:1809.04191), applied per block. p is the nearest-rank
    percentile: the smallest magnitude that at least `percentile` percent of the block do not exceed. Larger elements
    are clipped to p in magnitude, and error feedback keeps what they lose. If p is 0 (a block of zeros with a few
    exceptions), the largest magnitude is used instead, because those few elements would never be sent otherwise.

    Payload: see `BlockQuantizer`; codes are in two's complement. `percentile` is in (0, 100]; `bits` is 8, 4 or 2
    (ternary).
    """

    bits: int = 8
    block_size: int = 256
    percentile: float = 99.0
    stochastic: bool = False

    @property
    def code_bits(self) -> int:
        return self.bits

    @property
    def levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def _rank(self, width: int) -> int:
        """Return the 1-based rank of the percentile in a block of `width` elements.

        The slack of 1e-9 undoes binary fractions, as in 99.9 % of 1000.
        """
        return max(1, math.ceil(self.percentile * width / 100 - 1e-9))

    def _scales(self, rows: Tensor) -> Tensor:
        magnitudes = rows.abs()
        largest = magnitudes.amax(dim=1)
        clip = magnitudes.kthvalue(self._rank(rows.shape[1]), dim=1).values
        # Use the largest magnitude also if an element is infinite or NaN, so that the receiver sees it.
        use_clip = largest.isfinite() & (clip > 0)
        return fitted(torch.where(use_clip, clip, largest).div_(self.levels), torch.float32, self.levels)
