"""One bit an element."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compressors.blocks import BlockQuantizer, fitted
from deepspeed_compress.kernels import for_device

__all__ = ["Sign"]


@dataclass(frozen=True)
class Sign(BlockQuantizer):
    """sign(x) times the mean of |x| over each block of `block_size` elements, with sign(0) = 1.

    Source: scaled sign of Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv:1901.09847, algorithm 1), also used
    by 1-bit Adam (Tang et al., arXiv:2102.02888). The squared error on a block of n elements is
    ||x||**2 - ||x||_1**2 / n, so it needs error feedback. An element that is 0 becomes the mean, unless all are 0.

    Payload: see `BlockQuantizer`; a set bit is +1.
    """

    block_size: int = 256

    @property
    def code_bits(self) -> int:
        return 1

    def _quantize(self, rows: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        # In fp64, since the sum of finite elements may overflow.
        means = rows.abs().mean(dim=1, dtype=torch.float64)
        return fitted(means, torch.float32).unsqueeze(1), rows >= 0

    def _dequantize_add(self, numbers: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
        signs = codes.view(torch.int8) * 2 - 1
        for_device(out.device).dequantize_rows_add(numbers.squeeze(1), signs, out, scale)
