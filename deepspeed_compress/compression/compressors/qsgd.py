"""QSGD: stochastic quantization to levels between zero and the norm of a block."""

from dataclasses import dataclass

from deepspeed_compress.compression.compressors.blocks import FormQuantizer
from deepspeed_compress.compression.kernels.forms import BlockFormat


@dataclass(frozen=True)
class QSGD(FormQuantizer):
    """QSGD: sign(x) * ||x|| * l / s, where l is one of the two integers around |x| * s / ||x||, drawn without bias.

    Source: Alistarh et al., "QSGD" (arXiv:1610.02132, section 3.1, equation 3.1). ||x|| is the Euclidean norm of the
    block, and s = `levels` is 1 to 127. The variance is at most min(n / s**2, sqrt(n) / s) * ||x||**2 for a block of n
    elements (lemma 3.1).

    Codes have ceil(log2(2 s + 1)) bits in two's complement, in place of the paper's Elias codes, whose length depends
    on the data. The scale of a block is ||x|| / s, with ||x|| limited to the range of bf16, which is about that of
    fp32; rounding is unbiased with any norm that is at least max|x|. Payload: see `BlockQuantizer`.
    """

    levels: int = 7
    block_size: int = 256

    @property
    def stochastic(self) -> bool:
        return True

    @property
    def form(self) -> BlockFormat:
        return BlockFormat("norm", self.levels, (2 * self.levels).bit_length(), self.block_size)
