"""Ownership of the gradient elements in the flat buffer that FSDP2 reduce-scatters."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate

from torch import Tensor

from deepspeed_compress.collectives.buckets import LAYOUTS, Partition
from deepspeed_compress.compression.segments import Segment, gather, scatter

Sizes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of parameters."""


@dataclass(frozen=True)
class Layout:
    """Layout of a buffer.

    `segments` lie at their offsets in a buffer of `numel` elements; the other elements are padding. Concatenated in
    this order, they form the bucket that `partition` cuts.
    """

    segments: tuple[Segment, ...]
    partition: Partition
    numel: int

    def bucket(self, buffer: Tensor) -> Tensor:
        """Return the elements of the flat `buffer` [numel] without padding.

        The result is the buffer itself if it has no padding and the same order, else an fp32 copy.
        """
        return buffer if self._is_buffer else gather(buffer, self.segments)

    def hand_over(self, bucket: Tensor, rank: int, out: Tensor) -> None:
        """Copy the elements of `bucket` that `rank` owns to `out`, its flat part of the buffer. Padding becomes 0."""
        share = self.numel // self.partition.world_size
        places = [replace(one, offset=one.offset - rank * share) for one in self.segments if one.owner == rank]
        if sum(place.numel for place in places) != share:
            out.zero_()
        scatter(gather(bucket, self.partition.owned_by(rank)), places, out)

    @cached_property
    def _is_buffer(self) -> bool:
        same = zip(self.segments, self.partition.segments, strict=True)
        return self.partition.numel == self.numel and all(one.offset == other.offset for one, other in same)


@lru_cache(maxsize=LAYOUTS)
def find_layout(sizes: Sizes, ranks: int, whole: bool) -> Layout:
    """Return the layout of the gradients of parameters of `sizes`, in the order of FSDP2, over `ranks`.

    FSDP2 (`foreach_reduce_scatter_copy_in`) writes, for one rank after another, its rows of every parameter. All ranks
    have the same number of rows: those of the last ranks are padded, or consist only of padding. If `whole`, the bucket
    holds one parameter after another, for reducers that need whole parameters; otherwise, it has the order of the
    buffer.
    """
    segments = list(_segments(sizes, ranks))
    if whole:
        place = {name: number for number, (name, _) in enumerate(sizes)}
        segments.sort(key=lambda segment: (place[segment.parameter], segment.begin))
    offsets = accumulate((segment.numel for segment in segments), initial=0)
    moved = tuple(replace(segment, offset=offset) for segment, offset in zip(segments, offsets, strict=False))
    return Layout(tuple(segments), Partition(moved, ranks), ranks * sum(_share(shape, ranks) for _, shape in sizes))


def _segments(sizes: Sizes, ranks: int) -> Iterator[Segment]:
    offset = 0
    for owner in range(ranks):
        for name, shape in sizes:
            share = _share(shape, ranks)
            begin = owner * share
            numel = min(share, math.prod(shape) - begin)
            if numel > 0:
                yield Segment(name, begin, numel, offset, owner)
            offset += share


def _share(shape: tuple[int, ...], ranks: int) -> int:
    """Return the number of elements of a parameter that each rank has room for."""
    return math.ceil(shape[0] / ranks) * math.prod(shape[1:])
