"""Casts: every element is sent in another dtype. With fp32 this is the identity."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.base import aligned
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.arguments import Keys, MessageTable, ResidualBuffers


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
