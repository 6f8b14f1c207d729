"""Assignment of the slices of a flat bucket to data-parallel ranks.

Pure functions and frozen values: a partition is built once per bucket layout and then used as a dictionary key.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from torch import Tensor

from deepspeed_compress.compression.segments import PADDING, Segment

LAYOUTS = 1024
"""Number of bucket layouts whose derived data is cached.

It is more than the number of buckets of a large model. It bounds memory for models whose rarely used layers keep
producing new layouts.
"""


@dataclass(frozen=True)
class Partition:
    """A flat bucket cut into segments, in bucket order. Every element belongs to exactly one owner.

    `world_size` is the number of data-parallel ranks; owners are ranks of that group.
    """

    segments: tuple[Segment, ...]
    world_size: int

    def __post_init__(self) -> None:
        position = 0
        for segment in self.segments:
            assert segment.offset == position, f"segments leave a gap or overlap at {position}: {segment}"
            assert 0 <= segment.owner < self.world_size, f"owner outside the group of {self.world_size}: {segment}"
            position += segment.numel

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash, which a dictionary needs in every step, and which takes time for many segments."""
        return hash((self.segments, self.world_size))

    @cached_property
    def numel(self) -> int:
        return sum(segment.numel for segment in self.segments)

    def owned_by(self, rank: int) -> tuple[Segment, ...]:
        return tuple(segment for segment in self.segments if segment.owner == rank)


def flat_sizes(flat: Tensor, views: Iterable[tuple[str, Tensor]]) -> list[tuple[str, int]]:
    """Return (name, numel) of each part of the flat buffer `flat`, in order: its named `views`, and `PADDING`."""
    sizes: list[tuple[str, int]] = []
    end = 0
    for name, view in sorted((pair for pair in views if pair[1].numel()), key=lambda pair: pair[1].data_ptr()):
        offset = (view.data_ptr() - flat.data_ptr()) // flat.element_size()
        assert end <= offset <= flat.numel() - view.numel(), f"{name} is not a part of its buffer"
        sizes += [(PADDING, offset - end), (name, view.numel())]
        end = offset + view.numel()
    return [(name, numel) for name, numel in [*sizes, (PADDING, flat.numel() - end)] if numel]


def even_partition(sizes: Sequence[tuple[str, int]], world_size: int) -> Partition:
    """Return a bucket of whole parameters (name, numel), cut into `world_size` runs of near-equal length.

    The first `numel % world_size` owners get one more element. With fewer elements than ranks, the last ranks own
    nothing.
    """
    total = sum(numel for _, numel in sizes)
    share, larger = divmod(total, world_size)
    ends = [share * (rank + 1) + min(rank + 1, larger) for rank in range(world_size)]
    segments: list[Segment] = []
    offset = owner = 0
    for name, numel in sizes:
        begin = 0
        while begin < numel:
            while ends[owner] <= offset:
                owner += 1
            length = min(numel - begin, ends[owner] - offset)
            segments.append(Segment(name, begin, length, offset, owner))
            begin, offset = begin + length, offset + length
    return Partition(tuple(segments), world_size)


def partition_by_sizes(parts: Iterable[tuple[str, Sequence[tuple[int, int]]]], world_size: int) -> Partition:
    """Return a bucket of parameters, given as (name, [(owner, numel), ...]) in element order, less empty parts."""
    segments: list[Segment] = []
    offset = 0
    for name, owners in parts:
        begin = 0
        for owner, numel in owners:
            if numel:
                segments.append(Segment(name, begin, numel, offset, owner))
            begin, offset = begin + numel, offset + numel
    return Partition(tuple(segments), world_size)


def partition_each(sizes: Iterable[tuple[str, int]], world_size: int) -> Partition:
    """Return a bucket of parameters (name, numel), each cut into equal shares; the last may be shorter."""
    parts = []
    for name, numel in sizes:
        share = -(-numel // world_size)
        parts.append((name, [(rank, max(0, min(share, numel - rank * share))) for rank in range(world_size)]))
    return partition_by_sizes(parts, world_size)


@lru_cache(maxsize=LAYOUTS)
def partition_by_owners(sizes: tuple[tuple[str, int], ...], world_size: int) -> Partition:
    """Return a buffer of the owners' shares, each a share of every parameter (name, numel of a share)."""
    segments: list[Segment] = []
    offset = 0
    for owner in range(world_size):
        for name, numel in sizes:
            segments.append(Segment(name, owner * numel, numel, offset, owner))
            offset += numel
    return Partition(tuple(segments), world_size)


def select(partition: Partition, keep: Callable[[Segment], bool]) -> tuple[tuple[Segment, ...], Partition]:
    """Return the segments that `keep` accepts, and the partition of the sub-bucket that they form.

    `gather(bucket, segments)` is that sub-bucket. The partition has the same segments at their offsets in it.
    """
    kept = tuple(segment for segment in partition.segments if keep(segment))
    moved: list[Segment] = []
    offset = 0
    for segment in kept:
        moved.append(replace(segment, offset=offset))
        offset += segment.numel
    return kept, Partition(tuple(moved), partition.world_size)


def relabel(partition: Partition, owner_of: Callable[[int], int], world_size: int) -> Partition:
    """Return the same segments with owners `owner_of(owner)` in a group of `world_size`."""
    return Partition(tuple(replace(part, owner=owner_of(part.owner)) for part in partition.segments), world_size)


def even_cut(segments: Sequence[Segment], count: int) -> Partition:
    """Return a bucket of `segments`, which follow one another, cut over `count` owners of near-equal size."""
    runs = cut(segments, count)
    return Partition(tuple(replace(part, owner=owner) for owner, run in enumerate(runs) for part in run), count)


def cut(segments: Sequence[Segment], count: int) -> tuple[tuple[Segment, ...], ...]:
    """Split `segments`, in order, into `count` runs of near-equal numbers of elements; some may be empty."""
    total = sum(segment.numel for segment in segments)
    runs: list[list[Segment]] = [[] for _ in range(count)]
    position = 0
    for segment in segments:
        done = 0
        while done < segment.numel:
            run = position * count // total
            # The first position of the next run: the smallest p with p * count // total > run.
            length = min(segment.numel - done, -(-(run + 1) * total // count) - position)
            begin, offset = segment.begin + done, segment.offset + done
            runs[run].append(replace(segment, begin=begin, offset=offset, numel=length))
            done, position = done + length, position + length
    return tuple(tuple(run) for run in runs)
