"""Blockwise quantization with the largest elements clipped."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.blocks import SymmetricQuantizer, fitted

__all__ = ["Percentile"]


@dataclass(frozen=True)
class Percentile(SymmetricQuantizer):
    """q = round(x / s) with s = p / (2**(bits-1) - 1), p the `percentile` of |x| over each block of `block_size`.

    Source: calibration by percentiles of McKinstry et al. (arXiv:1809.04191), per block. p is the nearest-rank
    percentile: the smallest magnitude that at least `percentile` percent of the block do not exceed. A larger element
    is clipped to p in magnitude; error feedback keeps what it loses. Where p is 0 (a block of zeros but for a few) it
    is the largest magnitude instead, since else those few would never be sent.

    Payload: see `BlockQuantizer`; codes are two's complement. `percentile` is in (0, 100], `bits` 8, 4 or 2 (ternary).
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
        """Of a block of `width`, from 1. The slack undoes binary fractions, as in 99.9 % of 1000."""
        return max(1, math.ceil(self.percentile * width / 100 - 1e-9))

    def _scales(self, rows: Tensor) -> Tensor:
        magnitudes = rows.abs()
        largest = magnitudes.amax(dim=1)
        clip = magnitudes.kthvalue(self._rank(rows.shape[1]), dim=1).values
        # Also where an element is infinite or NaN, so that this arrives.
        use_clip = largest.isfinite() & (clip > 0)
        return fitted(torch.where(use_clip, clip, largest).div_(self.levels), torch.float32, self.levels)
