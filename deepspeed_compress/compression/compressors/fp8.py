"""Eight-bit floating point with one scale per block."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.blocks import RowQuantizer
from deepspeed_compress.compression.kernels.forms import fitted

FORMATS: Mapping[str, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class FP8(RowQuantizer):
    """x / s in an 8-bit floating-point format, with s = max|x| / (the format's largest finite number) per block.

    Source: the formats E4M3 (largest 448) and E5M2 (largest 57344) of Micikevicius et al., "FP8 Formats for Deep
    Learning" (arXiv:2209.05433, section 3), rounded to nearest even, saturating. Elements far below the largest one of
    their block keep 4 or 3 significant bits; integer codes would lose them.

    Payload: see `BlockQuantizer`.

    Raises:
        KeyError: `format` is not "e4m3" or "e5m2".
    """

    format: str = "e4m3"
    block_size: int = 256

    @property
    def dtype(self) -> torch.dtype:
        return FORMATS[self.format]

    @property
    def code_bits(self) -> int:
        return 8

    def _quantize(self, rows: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        largest = torch.finfo(self.dtype).max
        scales = fitted(rows.abs().amax(dim=1).div_(largest), torch.float32, int(largest))
        divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(1)
        return scales.unsqueeze(1), (rows / divisors).clamp_(-largest, largest).to(self.dtype)

    def _dequantize_add(self, numbers: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
        out.addcmul_(codes.view(self.dtype).to(torch.float32), numbers * scale)
