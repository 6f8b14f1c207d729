"""Batches: the messages of several owners that one codec encodes or decodes in one call.

The elements of a batch lie in a bucket, or in a flat fp32 tensor that holds message after message. There, each begins
at a multiple of the codec's alignment, and nothing reads what lies between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.tables import FIRST, SOURCE, MessageTable
from deepspeed_compress.compression.segments import Segment, runs_of


@dataclass(frozen=True)
class Part:
    """One message of a batch, which encodes `segments` as a single vector of `numel` elements.

    Attributes:
        segments: the segments; their offsets are places in the bucket.
        numel: number of elements.
        begin: first byte within the batch's buffer.
        end: end of its bytes within the buffer, exclusive.
        owner: owner of the elements, and with
        channel: the channel, part of the message's random key.
    """

    segments: tuple[Segment, ...]
    numel: int
    begin: int
    end: int
    owner: int
    channel: int


class Batch:
    """The messages `parts`, whose elements begin at multiples of `alignment` in a flat tensor."""

    def __init__(self, parts: Sequence[Part], alignment: int) -> None:
        self.parts = tuple(parts)
        self.firsts: list[int] = []
        rows, runs, first = [], [], 0
        for part in self.parts:
            pieces, position = runs_of(part.segments), first
            self.firsts.append(first)
            source = pieces[0][0] if len(pieces) == 1 else -1
            rows.append((source, first, part.numel, part.begin, part.end, part.owner, part.channel))
            for offset, numel in pieces:
                runs.append((offset, position, numel, 0, 0, 0, 0))
                position += numel
            first += -(-part.numel // alignment) * alignment
        self.numel = first
        self.table = MessageTable(torch.tensor(rows, dtype=torch.int64).view(-1, 7))
        self._runs = MessageTable(torch.tensor(runs, dtype=torch.int64).view(-1, 7))
        self._is_dense = first == sum(part.numel for part in self.parts)

    @cached_property
    def _is_in_place(self) -> bool:
        """Return True if no message has gaps in the bucket."""
        return len(self._runs.rows) == len(self.parts)

    def place(self, bucket: Tensor, flat: bool = False) -> tuple[Tensor, int]:
        """Return a tensor for the elements, and the table's column of their places in it.

        That is `bucket` itself if it is fp32, no message has gaps in it, and not `flat`; otherwise a new flat tensor.
        """
        if bucket.dtype == torch.float32 and self._is_in_place and not flat:
            return bucket, SOURCE
        return self.new_flat(bucket), FIRST

    def new_flat(self, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a flat tensor for the elements. What lies between messages is 0."""
        return (like.new_empty if self._is_dense else like.new_zeros)(self.numel, dtype=dtype)

    def read(self, bucket: Tensor, flat: bool = False) -> tuple[Tensor, int]:
        """Return what `place` returns, filled with the elements of `bucket`."""
        x, at = self.place(bucket, flat)
        return (x, at) if at == SOURCE else (self.gather(bucket), at)

    def gather(self, bucket: Tensor) -> Tensor:
        """Return a new flat fp32 tensor with the elements of `bucket`."""
        flat = self.new_flat(bucket, bucket.dtype)
        for_device(bucket.device).copy_runs(bucket, flat, self._runs, False)
        return flat.to(torch.float32)

    def scatter(self, flat: Tensor, bucket: Tensor) -> None:
        """Write the elements of `flat` into `bucket`."""
        for_device(bucket.device).copy_runs(flat.to(bucket.dtype), bucket, self._runs, True)

    def views(self, x: Tensor, at: int) -> list[tuple[Part, Tensor]]:
        """Return each part with the view of its elements in `x`, which lie where column `at` says."""
        begins = [row[at] for row in self.table.values]
        return [(part, x[begin : begin + part.numel]) for part, begin in zip(self.parts, begins, strict=True)]
