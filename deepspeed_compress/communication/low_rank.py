"""Which matrices of a bucket are worth a low-rank approximation, where their factors lie, and the algebra of a stack.

A stack is all matrices of one shape in a bucket, fp32 [count, m, n]. Their factors are held transposed, P as
[count, rank, m] and Q as [count, rank, n]: products run along contiguous rows (3 to 15 times faster on a CPU), and a
codec that scales by blocks meets one basis vector at a time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from deepspeed_compress.communication.buckets import Partition, even_partition, select
from deepspeed_compress.compression.segments import Segment

__all__ = [
    "LowRank",
    "LowRankLayout",
    "Matrix",
    "clean",
    "find_matrices",
    "make_low_rank_layout",
    "orthonormal",
    "products",
    "revived",
    "stacks",
]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """A parameter, `whole` in its bucket, as [rows, columns], to be approximated at `rank`."""

    whole: Segment
    rows: int
    columns: int
    rank: int

    @property
    def name(self) -> str:
        return self.whole.parameter

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def p_shape(self) -> tuple[int, int]:
        return self.rank, self.rows

    @property
    def q_shape(self) -> tuple[int, int]:
        return self.rank, self.columns


@dataclass(frozen=True)
class LowRank:
    """What is approximated: parameters with their `shapes`, by name, at `rank`, if that makes them more than
    `min_saving` times smaller."""

    shapes: Mapping[str, Shape]
    rank: int
    min_saving: float = 1.0

    def saves(self, name: str) -> bool:
        """Whether the factors of a parameter are as much smaller than itself as is asked for."""
        shape = self.shapes.get(name, ())
        if len(shape) < 2:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return (rows + columns) * min(self.rank, rows, columns) * self.min_saving < rows * columns


def find_matrices(partition: Partition, low_rank: LowRank) -> tuple[Matrix, ...]:
    """The parameters of a bucket to be approximated, equal shapes together.

    Those that `low_rank` names, of two dimensions or more (viewed as [shape[0], -1]), with all their elements in the
    bucket. The rank is capped by the smaller side.
    """
    found = []
    for whole in _runs(partition):
        shape = low_rank.shapes.get(whole.parameter, ())
        if (whole.begin, whole.numel) == (0, math.prod(shape)) and low_rank.saves(whole.parameter):
            rows, columns = shape[0], math.prod(shape[1:])
            found.append(Matrix(whole, rows, columns, min(low_rank.rank, rows, columns)))
    return tuple(sorted(found, key=lambda matrix: matrix.shape))


def _runs(partition: Partition) -> Iterator[Segment]:
    """The adjoining segments of each parameter as one, whoever owns them; none where elements are missing between."""
    for _, group in groupby(partition.segments, key=lambda segment: segment.parameter):
        run = list(group)
        if all(after.begin == before.begin + before.numel for before, after in pairwise(run)):
            yield replace(run[0], numel=sum(segment.numel for segment in run))


@dataclass(frozen=True)
class LowRankLayout:
    """How a bucket is divided into matrices, whose flat values are stack after stack, and the rest."""

    whole: tuple[Segment, ...]
    """The matrices in stack order, at their offsets in the bucket."""
    own: tuple[Segment, ...]
    """This rank's segments of them, at their offsets in the bucket."""
    own_values: tuple[Segment, ...]
    """The same segments, at their offsets in the values of the matrices."""
    others: tuple[Segment, ...]
    rest: Partition
    """`others` as a bucket of their own."""
    shapes: tuple[Shape, ...]
    p_shapes: tuple[Shape, ...]
    q_shapes: tuple[Shape, ...]
    """Of the stacks."""
    p: Partition
    q: Partition
    """The messages of all factors: the name of a parameter with ".P" or ".Q" at the end."""
    warm: tuple[Segment, ...]
    """Q of each matrix, whole, by the name of the parameter."""


def make_low_rank_layout(partition: Partition, matrices: Sequence[Matrix], rank: int) -> LowRankLayout:
    """The layout for data-parallel rank `rank` for a bucket with the `matrices` that `find_matrices` found."""
    numels = accumulate((matrix.whole.numel for matrix in matrices), initial=0)
    first = dict(zip((matrix.name for matrix in matrices), numels, strict=False))
    own = tuple(segment for segment in partition.owned_by(rank) if segment.parameter in first)
    others, rest = select(partition, lambda segment: segment.parameter not in first)
    alike = [(len(group), group[0]) for group in (list(g) for _, g in groupby(matrices, key=lambda m: m.shape))]
    return LowRankLayout(
        whole=tuple(matrix.whole for matrix in matrices),
        own=own,
        own_values=tuple(replace(segment, offset=first[segment.parameter] + segment.begin) for segment in own),
        others=others,
        rest=rest,
        shapes=tuple((count, *matrix.shape) for count, matrix in alike),
        p_shapes=tuple((count, *matrix.p_shape) for count, matrix in alike),
        q_shapes=tuple((count, *matrix.q_shape) for count, matrix in alike),
        p=even_partition([(f"{m.name}.P", math.prod(m.p_shape)) for m in matrices], partition.world_size),
        q=even_partition([(f"{m.name}.Q", math.prod(m.q_shape)) for m in matrices], partition.world_size),
        warm=even_partition([(m.name, math.prod(m.q_shape)) for m in matrices], 1).segments,
    )


def stacks(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Views of the consecutive parts of `flat` as tensors of `shapes`."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def products(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """The matrix products of each stack on the left with its counterpart, flat, stack after stack."""
    shapes = [(a.shape[0], a.shape[1], b.shape[2]) for a, b in zip(left, right, strict=True)]
    flat = left[0].new_empty(sum(math.prod(shape) for shape in shapes))
    for a, b, out in zip(left, right, stacks(flat, shapes), strict=True):
        torch.bmm(a, b, out=out)
    return flat


def orthonormal(factors: Tensor) -> Tensor:
    """An orthonormal basis of the rows of each matrix of `factors` ([count, rank, length], rank <= length, finite).

    Householder QR of the transpose: orthonormal even where rows are zero or dependent, a new direction for each of
    those; nothing waits for the values.
    """
    basis: Tensor = torch.linalg.qr(factors.mT).Q
    return basis.mT


def revived(factors: Tensor, start: Tensor) -> Tensor:
    """`factors` with the rows of `start` (the same shape) in the place of rows that are all zero or not finite."""
    largest = factors.abs().amax(dim=2, keepdim=True)
    return torch.where((largest > 0) & largest.isfinite(), factors, start)


def clean(factors: Tensor) -> tuple[Tensor, Tensor]:
    """`factors` with matrices that have a non-finite element made zero, and a taint for whatever comes of them.

    The taint, [count, 1, 1], is NaN for those matrices and 0 for the others.
    """
    taint = (factors - factors).sum(dim=(1, 2), keepdim=True)
    return torch.where(taint == 0, factors, 0.0), taint
