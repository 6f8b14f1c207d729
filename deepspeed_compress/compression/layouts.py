"""Layouts: the elements of parameters that make up a message, in order, and the overlaps of two layouts."""

from collections.abc import Collection, Iterator, Sequence

from deepspeed_compress.compression.segments import Segment

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
        return dict.fromkeys(home for piece in layout for home in self._overlapping(piece))

    def clear(self) -> None:
        """Remove all layouts."""
        self._homes.clear()

    def _overlapping(self, piece: Range) -> Iterator[Layout]:
        name, begin, numel = piece
        for (_, first, length), home in self._homes.get(name, {}).items():
            if first < begin + numel and begin < first + length:
                yield home
