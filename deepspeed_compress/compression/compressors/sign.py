"""One bit an element."""

from dataclasses import dataclass

from deepspeed_compress.compression.compressors.blocks import FormQuantizer
from deepspeed_compress.compression.kernels.forms import BlockFormat

__all__ = ["Sign"]


@dataclass(frozen=True)
class Sign(FormQuantizer):
    """sign(x) times the mean of |x| over each block of `block_size` elements, with sign(0) = 1.

    Source: scaled sign of Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv:1901.09847, algorithm 1), also used
    by 1-bit Adam (Tang et al., arXiv:2102.02888). The squared error on a block of n elements is
    ||x||**2 - ||x||_1**2 / n, so it needs error feedback. An element that is 0 becomes the mean, unless all are 0.

    Payload: see `BlockQuantizer`; a set bit is +1.
    """

    block_size: int = 256

    @property
    def form(self) -> BlockFormat:
        return BlockFormat("mean", 1, 1, self.block_size)
