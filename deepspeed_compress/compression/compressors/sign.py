"""Sign compression: one bit per element, or 1.6 bits with a third level at zero."""

from dataclasses import dataclass

import torch

from deepspeed_compress.compression.compressors.blocks import FormQuantizer
from deepspeed_compress.compression.kernels.forms import BlockFormat


@dataclass(frozen=True)
class Sign(FormQuantizer):
    """Scaled sign: sign(x) times the mean of |x| over each block of `block_size` elements, with sign(0) = 1.

    Source: Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv:1901.09847, algorithm 1), also used by 1-bit Adam
    (Tang et al., arXiv:2102.02888). The squared error on a block of n elements is ||x||**2 - ||x||_1**2 / n, so it
    needs error feedback. An element that is 0 becomes the mean, unless all are 0.

    `levels=3` adds a level at zero, like the ternary weights of Li and Liu (arXiv:1605.04711): s is the mean of the
    magnitudes that reach 3/4 of the mean of all (one iteration of Lloyd's algorithm, which starts from 1.5 times the
    mean), and elements below half of s become 0. The relative squared errors on normal / Laplace distributed elements
    are 0.19 / 0.27, compared with 0.36 / 0.50 for two levels.

    Payload: see `BlockQuantizer`; a set bit is +1. With three levels, each block starts on a byte boundary, and a byte
    holds five base-3 digits, the first one lowest: 0, 1 and 2 stand for -s, 0 and s.
    """

    block_size: int = 256
    levels: int = 2
    scale_dtype: torch.dtype = torch.float32

    @property
    def form(self) -> BlockFormat:
        if self.levels == 3:
            return BlockFormat("ternary", 1, 2, self.block_size)
        return BlockFormat("mean", 1, 1, self.block_size)
