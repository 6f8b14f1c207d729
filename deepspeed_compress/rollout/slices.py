"""Slices of parameters: what ranks publish, and how a slice is divided among those that hold it."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from deepspeed_compress.collectives.buckets import even_partition

_MAX_NUMEL = 1 << 24
"""Largest number of elements of a slice. It bounds the memory that a receiver needs in addition to its model."""

Region = tuple[str, int, int, int, int]
"""Name of a parameter, and elements of it: the first one, rows, elements in a row, and stride between rows."""


@dataclass(frozen=True, eq=False)
class Slice:
    """Rows of equal length in a flattened parameter. Most slices are one row.

    Attributes:
        name: name of the parameter in the plain model.
        shape: shape of the whole parameter.
        start: first element of the first row, in the flattened parameter.
        rows: number of rows.
        stride: elements from the beginning of a row to that of the next; 0 if there is only one.
        values: the elements of all rows. In training they have the shape [rows, elements of a row]; a copy in host
            memory is flat.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    rows: int
    stride: int
    values: Tensor

    @property
    def region(self) -> Region:
        return (self.name, self.start, self.rows, self.values.numel() // self.rows, self.stride)

    def select(self, whole: Tensor) -> Tensor:
        """Return the elements of this slice in another tensor of the whole parameter's shape, in that of `values`."""
        width = self.values.shape[1]
        return whole.reshape(-1).as_strided((self.rows, width), (self.stride or width, 1), self.start)

    def cut(self, begin: int, numel: int) -> Iterator["Slice"]:
        """Yield slices with the `numel` elements from `begin` on, row after row. The values must not be flat."""
        width = self.values.shape[1]
        while numel:
            row, column = divmod(begin, width)
            whole = column == 0 and numel >= width
            rows, columns = (numel // width, width) if whole else (1, min(width - column, numel))
            values = self.values[row : row + rows, column : column + columns]
            start, stride = self.start + row * self.stride + column, self.stride if rows > 1 else 0
            yield Slice(self.name, self.shape, start, rows, stride, values)
            begin, numel = begin + rows * columns, numel - rows * columns


def rectangle(name: str, shape: tuple[int, ...], row: int, column: int, values: Tensor) -> Slice:
    """Return a slice with a rectangle of a parameter as a matrix: its first dimension by all others.

    Args:
        name: name of the parameter in the plain model.
        shape: shape of the whole parameter.
        row: first row.
        column: first column.
        values: the rectangle, of shape [rows, columns].
    """
    width = math.prod(shape[1:])
    start = row * width + column
    if values.shape[1] == width and values.is_contiguous():
        return Slice(name, shape, start, 1, 0, values.view(1, -1))
    return Slice(name, shape, start, len(values), width if len(values) > 1 else 0, values)


def find_holders(everyone: Sequence[Sequence[Region]]) -> Mapping[Region, tuple[int, ...]]:
    """Return the ranks that hold each region, given the regions of each rank."""
    holders: defaultdict[Region, tuple[int, ...]] = defaultdict(tuple)
    for rank, regions in enumerate(everyone):
        for region in regions:
            holders[region] += (rank,)
    return dict(holders)


def find_shares(held: Sequence[Slice], holders: Mapping[Region, Sequence[int]], rank: int) -> list[Slice]:
    """Return this rank's even shares of the slices that it holds, none longer than 2**24 elements."""
    alike: defaultdict[Sequence[int], list[Slice]] = defaultdict(list)
    for one in held:
        alike[holders[one.region]].append(one)
    return [piece for ranks, slices in alike.items() for piece in _share(slices, len(ranks), ranks.index(rank))]


def _share(slices: Sequence[Slice], ranks: int, index: int) -> Iterator[Slice]:
    """Yield the share of one of `ranks` that hold the same slices."""
    partition = even_partition([(str(number), one.values.numel()) for number, one in enumerate(slices)], ranks)
    for part in partition.owned_by(index):
        for begin in range(0, part.numel, _MAX_NUMEL):
            yield from slices[int(part.parameter)].cut(part.begin + begin, min(_MAX_NUMEL, part.numel - begin))
