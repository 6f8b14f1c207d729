"""Quantizers: a few bits per element, and one or two numbers per block of elements. Casts send elements in a dtype."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.blocks import FormQuantizer, RowQuantizer
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.arguments import (
    LEVELS,
    BlockFormat,
    Keys,
    MessageTable,
    ResidualBuffers,
    aligned,
    fitted,
)

_FITTED: Mapping[int, str] = {2: "lloyd", 3: "eight"}
"""Kinds of `BlockFormat` with fitted levels, for bit widths at which levels scaled by max|x| are too coarse."""


@dataclass(frozen=True)
class Cast:
    """Cast of the elements to `dtype` (fp32, bf16 or fp16), rounded to nearest even; fp32 is exact.

    Finite values beyond the range of `dtype` saturate, so only infinite values arrive as infinite.
    """

    dtype: torch.dtype = torch.float32

    def payload_bytes(self, numel: int) -> int:
        return aligned(numel * self.dtype.itemsize)

    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        for_device(x.device).cast(x, self.elements(out, x.numel()))
        out[x.numel() * self.dtype.itemsize :].zero_()

    def elements(self, payload: Tensor, numel: int) -> Tensor:
        """Return the `numel` elements of `payload` as a view of `dtype`."""
        return payload[: numel * self.dtype.itemsize].view(self.dtype)

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        for_device(out.device).add_cast(self.elements(payload, out.numel()), out, scale)

    def compress_all(
        self, x: Tensor, at: int, out: Tensor, table: MessageTable, keys: Keys, residual: ResidualBuffers | None
    ) -> None:
        """See `ManyMessages`."""
        assert residual is None, "a cast does not update residuals"
        for_device(x.device).cast_messages(x, at, self.dtype, out, table)

    def decompress_all(
        self, payloads: Tensor, table: MessageTable, out: Tensor, at: int, scale: float, add: bool
    ) -> None:
        """See `ManyMessages`."""
        for_device(out.device).add_cast_messages(payloads, self.dtype, table, out, at, scale, add)


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

    Payload: see `BlockFormat`. Codes are in two's complement. Codes of four levels have bit 2 for the sign plus 1
    for an outer level; codes of eight levels have bit 4 for the sign plus 0 to 3.
    """

    bits: int = 8
    block_size: int = 256
    stochastic: bool = False
    scale_dtype: torch.dtype = torch.float32

    @property
    def form(self) -> BlockFormat:
        kind = None if self.stochastic else _FITTED.get(self.bits)
        if kind is not None:
            return BlockFormat(kind, LEVELS[kind].magnitudes[-1], self.bits, self.block_size, self.scale_dtype)
        return BlockFormat("absmax", 2 ** (self.bits - 1) - 1, self.bits, self.block_size, self.scale_dtype)


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

    Payload: see `BlockFormat`; a set bit is +1. With three levels, each block starts on a byte boundary, and a byte
    holds five base-3 digits, the first one lowest: 0, 1 and 2 stand for -s, 0 and s.
    """

    block_size: int = 256
    levels: int = 2
    scale_dtype: torch.dtype = torch.float32

    @property
    def form(self) -> BlockFormat:
        if self.levels == 3:
            return BlockFormat("ternary", 1, 2, self.block_size, self.scale_dtype)
        return BlockFormat("mean", 1, 1, self.block_size, self.scale_dtype)


@dataclass(frozen=True)
class QSGD(FormQuantizer):
    """QSGD: sign(x) * ||x|| * l / s, where l is one of the two integers around |x| * s / ||x||, drawn without bias.

    Source: Alistarh et al., "QSGD" (arXiv:1610.02132, section 3.1, equation 3.1). ||x|| is the Euclidean norm of the
    block, and s = `levels` is 1 to 127. The variance is at most min(n / s**2, sqrt(n) / s) * ||x||**2 for a block of n
    elements (lemma 3.1).

    Codes have ceil(log2(2 s + 1)) bits in two's complement, in place of the paper's Elias codes, whose length depends
    on the data. The scale of a block is ||x|| / s, with ||x|| limited to the range of bf16, which is about that of
    fp32; rounding is unbiased with any norm that is at least max|x|. Payload: see `BlockFormat`.
    """

    levels: int = 7
    block_size: int = 256

    @property
    def stochastic(self) -> bool:
        return True

    @property
    def form(self) -> BlockFormat:
        return BlockFormat("norm", self.levels, (2 * self.levels).bit_length(), self.block_size)


FORMATS: Mapping[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class FP8(RowQuantizer):
    """x / s in an 8-bit floating-point format, with s = max|x| / (the format's largest finite number) per block.

    Source: the formats E4M3 (largest 448) and E5M2 (largest 57344) of Micikevicius et al., "FP8 Formats for Deep
    Learning" (arXiv:2209.05433, section 3), rounded to nearest even, saturating. Elements far below the largest one of
    their block keep 4 or 3 significant bits; integer codes would lose them.

    Payload: see `RowQuantizer`.

    Raises:
        KeyError: `format` is not "e4m3" or "e5m2".
    """

    format: str = "e4m3"
    block_size: int = 256

    @property
    def dtype(self) -> torch.dtype:
        return FORMATS[self.format]

    @property
    def bits(self) -> int:
        return 8

    def _quantize(self, rows: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        largest = torch.finfo(self.dtype).max
        scales = fitted(rows.abs().amax(dim=1).div_(largest), torch.float32, int(largest))
        divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(1)
        return scales.unsqueeze(1), (rows / divisors).clamp_(-largest, largest).to(self.dtype)

    def _dequantize_add(self, numbers: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
        out.addcmul_(codes.view(self.dtype).to(torch.float32), numbers * scale)


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

    Payload: see `RowQuantizer`; the numbers of a block are lo and hi.
    """

    numbers: ClassVar[int] = 2
    bits: int = 8
    block_size: int = 256
    stochastic: bool = False
    scale_dtype: torch.dtype = torch.float32

    @property
    def levels(self) -> int:
        return (1 << self.bits) - 1

    def _quantize(self, rows: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        extremes, largest = torch.stack(rows.aminmax(dim=1), dim=1), torch.finfo(self.scale_dtype).max
        rounded = extremes.clamp(-largest, largest).to(self.scale_dtype).to(torch.float32)
        sent = torch.where(extremes.isfinite(), rounded, extremes)
        low, high = sent.unbind(dim=1)
        return sent, for_device(rows.device).quantize_rows_between(rows, low, high, self.levels, noise)

    def _dequantize_add(self, numbers: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
        # A weighted mean of lo and hi cannot overflow; lo + q * step can.
        share = codes / self.levels
        low, high = numbers.unsqueeze(2).unbind(dim=1)
        out.add_(low * (1 - share) + high * share, alpha=scale)


@dataclass(frozen=True)
class Percentile(RowQuantizer):
    """Clipped quantization: q = round(x / s) with s = p / (2**(bits-1) - 1), and p a percentile of |x| in the block.

    Source: percentile calibration of McKinstry et al. (arXiv:1809.04191), applied per block. p is the nearest-rank
    percentile: the smallest magnitude that at least `percentile` percent of the block do not exceed. Larger elements
    are clipped to p in magnitude, and error feedback keeps what they lose. If p is 0 (a block of zeros with a few
    exceptions), the largest magnitude is used instead, because those few elements would never be sent otherwise.

    Rounding is to nearest even. If stochastic, it is floor(x / s + u) with u uniform in [0, 1), which is unbiased for
    |x| <= p (Alistarh et al., QSGD, arXiv:1610.02132, section 3.1).

    Payload: see `RowQuantizer`; codes are in two's complement. `percentile` is in (0, 100]; `bits` is 8, 4 or 2
    (ternary).
    """

    bits: int = 8
    block_size: int = 256
    percentile: float = 99.0
    stochastic: bool = False

    @property
    def levels(self) -> int:
        return (1 << self.bits - 1) - 1

    def _quantize(self, rows: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        magnitudes = rows.abs()
        largest = magnitudes.amax(dim=1)
        # The slack of 1e-9 undoes binary fractions, as in 99.9 % of 1000.
        rank = max(1, math.ceil(self.percentile * rows.shape[1] / 100 - 1e-9))
        clip = magnitudes.kthvalue(rank, dim=1).values
        # Use the largest magnitude also if an element is infinite or NaN, so that the receiver sees it.
        use_clip = largest.isfinite() & (clip > 0)
        scales = fitted(torch.where(use_clip, clip, largest).div_(self.levels), torch.float32, self.levels)
        return scales.unsqueeze(1), for_device(rows.device).quantize_rows(rows, scales, self.levels, noise)

    def _dequantize_add(self, numbers: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
        unused = 8 - self.bits
        signed = (codes << unused).view(torch.int8) >> unused
        for_device(out.device).dequantize_rows_add(numbers.squeeze(1), signed, out, scale)
