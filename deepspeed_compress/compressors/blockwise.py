"""Blockwise absmax quantization to 8 or 4 bits."""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from deepspeed_compress.compressors.base import aligned
from deepspeed_compress.kernels import for_device

__all__ = ["Blockwise"]


@dataclass(frozen=True)
class Blockwise:
    """q = round(x / s) with s = max|x| / (2**(bits-1) - 1) over each block of `block_size` elements.

    Source: block-wise quantization of Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
    (arXiv:2110.02861, section 2.1), with linear symmetric levels; `stochastic` rounds to floor(x / s + u),
    u uniform in [0, 1), which is unbiased (Alistarh et al., QSGD, arXiv:1610.02132, section 3.1).

    Payload: fp32 scales of all blocks, then the codes: a byte each for 8 bits, two to a byte for 4.
    """

    bits: int = 8
    block_size: int = 256
    stochastic: bool = False

    @property
    def levels(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def payload_bytes(self, numel: int) -> int:
        return self._scale_bytes(numel) + aligned(self._code_bytes(numel))

    def _scale_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block_size)

    def _code_bytes(self, numel: int) -> int:
        return -(-numel * self.bits // 8)

    def _rows(self, flat: Tensor) -> list[Tensor]:
        """`flat` as whole blocks [r, block_size] and a shorter last block [1, rest], views of it."""
        whole = flat.numel() // self.block_size * self.block_size
        rows = [flat[:whole].view(-1, self.block_size), flat[whole:].view(1, -1)]
        return [part for part in rows if part.numel()]

    def _fields(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Scales (fp32) and packed codes (uint8) of `payload`, as views."""
        split = self._scale_bytes(numel)
        return payload[:split].view(torch.float32), payload[split : split + self._code_bytes(numel)]

    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        kernels = for_device(x.device)
        scales, packed = self._fields(out, x.numel())
        codes = torch.empty(x.numel(), dtype=torch.int8, device=x.device)
        noise = self._rows(kernels.uniform(x.numel(), key, x.device)) if self.stochastic else (None, None)
        first = 0
        for rows, code_rows, row_noise in zip(self._rows(x), self._rows(codes), noise, strict=False):
            row_scales, row_codes = kernels.quantize_rows(rows, self.levels, row_noise)
            scales[first : first + len(rows)] = row_scales
            code_rows.copy_(row_codes)
            first += len(rows)
        _PACK[self.bits](codes, packed)
        out[scales.nbytes + packed.nbytes :].zero_()

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        kernels = for_device(out.device)
        scales, packed = self._fields(payload, out.numel())
        codes = _UNPACK[self.bits](packed, out.numel())
        first = 0
        for code_rows, out_rows in zip(self._rows(codes), self._rows(out), strict=True):
            kernels.dequantize_rows_add(scales[first : first + len(out_rows)], code_rows, out_rows, scale)
            first += len(out_rows)


_PACK: MappingProxyType[int, Callable[[Tensor, Tensor], object]] = MappingProxyType(
    {
        8: lambda codes, packed: packed.copy_(codes.view(torch.uint8)),
        4: lambda codes, packed: for_device(codes.device).pack_nibbles(codes, packed),
    }
)
_UNPACK: MappingProxyType[int, Callable[[Tensor, int], Tensor]] = MappingProxyType(
    {
        8: lambda packed, count: packed.view(torch.int8),
        4: lambda packed, count: for_device(packed.device).unpack_nibbles(packed, count),
    }
)
