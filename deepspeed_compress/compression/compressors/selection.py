"""Selections of sparsifiers: how many elements of each block are kept, and how their indices are packed."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.base import aligned
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.forms import ResidualBuffers


@dataclass(frozen=True)
class Selection:
    """Selection of ceil(density * width) elements of every block of width `block_size`, whatever the values.

    The last block of the `numel` elements may be shorter. Indices are relative to their block, so they take
    ceil(log2(block_size)) bits.
    """

    numel: int
    block_size: int
    density: float

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """Return (blocks, width, kept per block) for the whole blocks, and for the shorter last one if there is one."""
        whole, rest = divmod(self.numel, self.block_size)
        return [
            (count, width, self._of(width)) for count, width in ((whole, self.block_size), (1, rest)) if count * width
        ]

    def _of(self, width: int) -> int:
        """Return how many elements of a block of `width` are kept.

        The slack of 1e-9 undoes binary fractions: 0.07 * 100 keeps 7, not 8.
        """
        return min(width, max(1, math.ceil(self.density * width - 1e-9)))

    @property
    def kept(self) -> int:
        return sum(count * kept for count, _, kept in self.parts)

    @property
    def index_bits(self) -> int:
        return (self.block_size - 1).bit_length()

    @property
    def index_bytes(self) -> int:
        return aligned(-(-self.kept * self.index_bits // 8))

    def columns(self, x: Tensor, select: Callable[[Tensor, int], Tensor]) -> Tensor:
        """Return the block-relative indices (int64 [kept]) that `select` chooses.

        `select` takes rows of `x` and k, and returns int64 [rows, k].
        """
        found = [select(x[part].view(shape), kept).view(-1) for part, shape, kept in self._rows()]
        return torch.cat(found or [x.new_empty(0, dtype=torch.int64)])

    def columns_of_sum(self, x: Tensor, residual: ResidualBuffers) -> tuple[Tensor, Tensor]:
        """Return the block-relative indices of the largest elements of the sum `x` + decay * before, and their values.

        The whole sum is written to `after`. Indices are int64 [kept], values fp32 [kept].
        """
        found = [(x.new_empty(0, dtype=torch.int64), x.new_empty(0))]
        for part, shape, kept in self._rows():
            inside = ResidualBuffers(residual.before[part], residual.decay, residual.after[part])
            columns, values = for_device(x.device).top_k_rows_of_sum(x[part].view(shape), kept, inside)
            found.append((columns.view(-1), values.view(-1)))
        columns, values = zip(*found, strict=True)
        return torch.cat(columns), torch.cat(values)

    def _rows(self) -> Iterator[tuple[slice, tuple[int, int], int]]:
        """Yield (slice of the elements, their shape [rows, width], kept per row) for each of `parts`."""
        begin = 0
        for count, width, kept in self.parts:
            yield slice(begin, begin + count * width), (count, width), kept
            begin += count * width

    def positions(self, columns: Tensor) -> Tensor:
        """Return the absolute indices of the block-relative `columns`, both int64 [kept]."""
        starts, begin = [columns.new_empty(0)], 0
        for count, width, kept in self.parts:
            first = torch.arange(begin, begin + count * width, width, device=columns.device)
            starts.append(first.repeat_interleave(kept))
            begin += count * width
        return columns + torch.cat(starts)

    def pack(self, columns: Tensor, out: Tensor) -> None:
        """Pack `columns` into `out` (uint8 [index_bytes])."""
        for_device(columns.device).pack_bits(columns, self.index_bits, out)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the absolute indices of packed columns: int64 [kept]."""
        return self.positions(for_device(packed.device).unpack_bits(packed, self.index_bits, self.kept))
