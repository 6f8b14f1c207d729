"""Blockwise top-k sparsification, the kept values sent as they are or quantized."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compressors.base import Compressor, aligned
from deepspeed_compress.compressors.cast import Cast
from deepspeed_compress.kernels import for_device

__all__ = ["TopK"]


@dataclass(frozen=True)
class TopK:
    """The ceil(density * block_size) elements of largest magnitude of every block.

    Source: top-k sparsification with memory, Stich et al. (arXiv:1809.07599, definition 2.1), here per block of
    fixed size, so that the payload size is known and an index takes log2(block_size) bits. `values`
    compresses the kept values of all blocks as one vector.

    Payload: packed block-relative indices, then the payload of the values.
    """

    density: float = 0.01
    block_size: int = 4096
    values: Compressor = Cast(torch.float32)  # noqa: RUF009  (frozen, hence safe to share)

    @property
    def index_bits(self) -> int:
        return (self.block_size - 1).bit_length()

    def _kept(self, width: int) -> int:
        """Elements kept of a block of `width`. The slack undoes binary fractions: 0.07 * 100 keeps 7, not 8."""
        return min(width, math.ceil(self.density * width - 1e-9)) if width else 0

    def kept(self, numel: int) -> int:
        """Elements kept of `numel`: exact, whatever their values."""
        whole, rest = divmod(numel, self.block_size)
        return whole * self._kept(self.block_size) + self._kept(rest)

    def _index_bytes(self, numel: int) -> int:
        return aligned(-(-self.kept(numel) * self.index_bits // 8))

    def payload_bytes(self, numel: int) -> int:
        return self._index_bytes(numel) + self.values.payload_bytes(self.kept(numel))

    def compress(self, x: Tensor, out: Tensor, key: int) -> None:
        kernels = for_device(x.device)
        split = self._index_bytes(x.numel())
        columns = self._select(x)
        kernels.pack_bits(columns, self.index_bits, out[:split])
        self.values.compress(x[columns + self._bases(x)], out[split:], key)

    def _select(self, x: Tensor) -> Tensor:
        """Block-relative indices of the kept elements, block after block."""
        top_k_rows: Callable[[Tensor, int], Tensor] = for_device(x.device).top_k_rows
        whole = x.numel() // self.block_size * self.block_size
        body = top_k_rows(x[:whole].view(-1, self.block_size), self._kept(self.block_size)).view(-1)
        if whole == x.numel():
            return body
        tail = top_k_rows(x[whole:].view(1, -1), self._kept(x.numel() - whole)).view(-1)
        return torch.cat((body, tail))

    def _bases(self, like: Tensor) -> Tensor:
        """First element of the block of each kept element: int64 [kept]."""
        whole, rest = divmod(like.numel(), self.block_size)
        starts = torch.arange(whole + (rest > 0), device=like.device) * self.block_size
        counts = [self._kept(self.block_size)] * whole + [self._kept(rest)] * (rest > 0)
        return starts.repeat_interleave(torch.tensor(counts, dtype=torch.int64, device=like.device))

    def decompress_add(self, payload: Tensor, out: Tensor, scale: float) -> None:
        split = self._index_bytes(out.numel())
        kept = self.kept(out.numel())
        columns = for_device(out.device).unpack_bits(payload[:split], self.index_bits, kept)
        values = torch.zeros(kept, dtype=torch.float32, device=out.device)
        self.values.decompress_add(payload[split:], values, scale)
        out.index_add_(0, columns + self._bases(out), values)
