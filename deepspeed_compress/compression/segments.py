"""Segments, slices of parameters in a flat bucket, and layouts, the slices that make up a message."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = ""
"""Parameter name of elements that only pad a buffer."""


@dataclass(frozen=True)
class Segment:
    """A slice of `parameter`, elements `begin` to `begin + numel`, at `offset` in the bucket, owned by rank `owner`."""

    parameter: str
    begin: int
    numel: int
    offset: int
    owner: int


def runs_of(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return (offset, numel) of the contiguous slices that `segments` cover, in order."""
    runs: list[tuple[int, int]] = []
    for segment in segments:
        if runs and sum(runs[-1]) == segment.offset:
            runs[-1] = (runs[-1][0], runs[-1][1] + segment.numel)
        else:
            runs.append((segment.offset, segment.numel))
    return runs


def gather(bucket: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return a new flat fp32 tensor with the elements of `segments`, in order."""
    parts = [bucket.narrow(0, offset, numel) for offset, numel in runs_of(segments)]
    if len(parts) == 1:
        return parts[0].to(torch.float32, copy=True)
    return torch.cat(parts).to(torch.float32) if parts else bucket.new_zeros(0, dtype=torch.float32)


def elements(bucket: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return what `gather` returns, as a view if `bucket` is fp32 and the segments are contiguous in it."""
    runs = runs_of(segments)
    is_view = bucket.dtype == torch.float32 and len(runs) == 1
    return bucket.narrow(0, *runs[0]) if is_view else gather(bucket, segments)


def scatter(values: Tensor, segments: Sequence[Segment], bucket: Tensor) -> None:
    """Copy flat `values` into the elements of `segments` in `bucket`; the inverse of `gather`."""
    position = 0
    for offset, numel in runs_of(segments):
        bucket.narrow(0, offset, numel).copy_(values.narrow(0, position, numel))
        position += numel


Range = tuple[str, int, int]
"""A range of a parameter's elements: (name, begin, numel)."""
Layout = tuple[Range, ...]
"""The ranges of one message, in order."""


def layout_of(segments: Sequence[Segment]) -> Layout:
    """Return the ranges of `segments`, regardless of their offsets in the bucket."""
    return tuple((segment.parameter, segment.begin, segment.numel) for segment in segments)


def segments_of(layout: Layout) -> tuple[Segment, ...]:
    """Return the segments of a bucket that holds this message and nothing else."""
    return tuple(Segment(*piece, position, 0) for piece, position in placed(layout))


def numel_of(layout: Layout) -> int:
    """Return the number of elements in the message."""
    return sum(numel for _, _, numel in layout)


def placed(layout: Layout) -> Iterator[tuple[Range, int]]:
    """Yield every range with its position in the message."""
    position = 0
    for piece in layout:
        yield piece, position
        position += piece[2]


def cuts(home: Layout, layout: Layout) -> Iterator[tuple[Range, int, int, int, int | None]]:
    """Cut the ranges of `home` at the boundaries of the ranges of `layout`.

    Yields:
        (range, its position in `home`, first element of the part, end of the part, position in `layout` or None).
    """
    for piece, start in placed(home):
        name, begin, numel = piece
        done = begin
        overlaps = sorted((part[1], part[1] + part[2], at) for part, at in placed(layout) if part[0] == name)
        for first, last, at in overlaps:
            low, high = max(begin, first), min(begin + numel, last)
            if low >= high:
                continue
            if done < low:
                yield piece, start, done, low, None
            yield piece, start, low, high, at + low - first
            done = high
        if done < begin + numel:
            yield piece, start, done, begin + numel, None


class LayoutIndex:
    """Layouts that share no elements, found by the ranges that they contain."""

    def __init__(self) -> None:
        self._homes: dict[str, dict[Range, Layout]] = {}

    def add(self, layout: Layout) -> None:
        """Add `layout`, which overlaps no other one."""
        for piece in layout:
            self._homes.setdefault(piece[0], {})[piece] = layout

    def remove(self, layout: Layout) -> None:
        """Remove `layout`, which was added.

        Raises:
            KeyError: it was not.
        """
        for piece in layout:
            del self._homes[piece[0]][piece]

    def touching(self, layout: Layout) -> Collection[Layout]:
        """Return the added layouts that share elements with `layout`, each once, in the order of its ranges."""
        return dict.fromkeys(
            home
            for name, begin, numel in layout
            for (_, first, length), home in self._homes.get(name, {}).items()
            if first < begin + numel and begin < first + length
        )

    def clear(self) -> None:
        """Remove all layouts."""
        self._homes.clear()
