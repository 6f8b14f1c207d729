"""Which elements of which parameters a message has, in its order; and how layouts overlap."""

from collections.abc import Iterator, Sequence

from deepspeed_compress.compression.segments import Segment

__all__ = ["Layout", "Range", "cuts", "layout_of", "numel_of", "placed", "segments_of"]

Range = tuple[str, int, int]
"""Elements of a parameter: (name, begin, numel)."""
Layout = tuple[Range, ...]
"""The ranges of one message, in its order."""


def layout_of(segments: Sequence[Segment]) -> Layout:
    """The ranges of `segments`, wherever those lie in a bucket."""
    return tuple((segment.parameter, segment.begin, segment.numel) for segment in segments)


def segments_of(layout: Layout) -> tuple[Segment, ...]:
    """The segments of a bucket that has the message alone."""
    return tuple(Segment(*piece, position, 0) for piece, position in placed(layout))


def numel_of(layout: Layout) -> int:
    """Elements of the message."""
    return sum(numel for _, _, numel in layout)


def placed(layout: Layout) -> Iterator[tuple[Range, int]]:
    """Every range with its position in the message."""
    position = 0
    for piece in layout:
        yield piece, position
        position += piece[2]


def cuts(home: Layout, layout: Layout) -> Iterator[tuple[Range, int, int, int, int | None]]:
    """Cut the ranges of `home` where those of `layout` begin and end.

    Yields (range, its position in `home`, first element of the part, its end, its position in `layout` or None).
    """
    for piece, start in placed(home):
        name, begin, numel = piece
        done = begin
        takers = sorted((taker[1], taker[1] + taker[2], at) for taker, at in placed(layout) if taker[0] == name)
        for first, last, at in takers:
            low, high = max(begin, first), min(begin + numel, last)
            if low >= high:
                continue
            if done < low:
                yield piece, start, done, low, None
            yield piece, start, low, high, at + low - first
            done = high
        if done < begin + numel:
            yield piece, start, done, begin + numel, None
