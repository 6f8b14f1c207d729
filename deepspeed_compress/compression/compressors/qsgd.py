"""Quantization to random levels between zero and the norm of a block."""

from dataclasses import dataclass

from deepspeed_compress.compression.compressors.blocks import FormQuantizer
from deepspeed_compress.compression.kernels.forms import BlockFormat

__all__ = ["QSGD"]


@dataclass(frozen=True)
class QSGD(FormQuantizer):
    """sign(x) * ||x|| * l / s, with l one of the two integers around |x| * s / ||x||, at random and without bias.

    Source: Alistarh et al., "QSGD" (arXiv:1610.02132, section 3.1, equation 3.1): ||x|| is the Euclidean norm of the
    block of `block_size` elements and s = `levels`, 1 to 127. The variance is at most
    min(n / s**2, sqrt(n) / s) * ||x||**2 for a block of n (lemma 3.1).

    Codes have ceil(log2(2 s + 1)) bits, in two's complement, instead of the paper's Elias codes, whose length depends
    on the data. The scale of a block is ||x|| / s, with ||x|| limited to the range of bf16, about that of
    fp32: any norm not below max|x| leaves the rounding unbiased. Payload: see `BlockQuantizer`.
    """

    levels: int = 7
    block_size: int = 256

    @property
    def stochastic(self) -> bool:
        return True

    @property
    def form(self) -> BlockFormat:
        return BlockFormat("norm", self.levels, (2 * self.levels).bit_length(), self.block_size)
