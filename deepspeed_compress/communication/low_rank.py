"""Which matrices of a bucket are worth a low-rank approximation, where their factors lie, and the algebra of a stack.

A stack is matrices of one shape in a bucket, fp32 [count, m, n], few enough to stay in a cache. Their factors are held
transposed, P as [count, rank, m] and Q as [count, rank, n]: products run along contiguous rows (3 to 15 times faster on
a CPU), and a codec that scales by blocks meets one basis vector at a time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from deepspeed_compress.communication.buckets import Partition, even_partition, select
from deepspeed_compress.compression.segments import Segment

__all__ = [
    "LowRank",
    "LowRankLayout",
    "Matrix",
    "Stack",
    "clean",
    "find_matrices",
    "make_low_rank_layout",
    "orthonormal",
    "revived",
    "split",
]

Shape = tuple[int, ...]

STACK_NUMEL = 1 << 18
"""Elements of a stack, unless one matrix has more: what is read several times in a row is then still in a cache."""


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
class Stack:
    """Matrices of one shape and rank that are treated at once; `own`: this rank's segments of them."""

    matrices: tuple[Matrix, ...]
    own: tuple[Segment, ...]

    @cached_property
    def whole(self) -> tuple[Segment, ...]:
        """The matrices, at their offsets in the bucket."""
        return tuple(matrix.whole for matrix in self.matrices)

    @property
    def shape(self) -> Shape:
        return len(self.matrices), *self.matrices[0].shape

    @property
    def p_shape(self) -> Shape:
        return len(self.matrices), *self.matrices[0].p_shape

    @property
    def q_shape(self) -> Shape:
        return len(self.matrices), *self.matrices[0].q_shape

    def inside(self, segments: Sequence[Segment]) -> list[Segment]:
        """`segments` of these matrices, at their offsets in the flat elements of the stack."""
        numels = accumulate((one.numel for one in self.whole), initial=0)
        first = dict(zip((one.parameter for one in self.whole), numels, strict=False))
        return [replace(one, offset=first[one.parameter] + one.begin) for one in segments]


@dataclass(frozen=True)
class LowRankLayout:
    """How a bucket is divided into stacks of matrices and the rest."""

    stacks: tuple[Stack, ...]
    others: tuple[Segment, ...]
    rest: Partition
    """`others` as a bucket of their own."""
    p: Partition
    q: Partition
    """The messages of all factors, stack after stack: the name of a parameter with ".P" or ".Q" at the end."""
    warm: tuple[Segment, ...]
    """Q of each matrix, whole, by the name of the parameter."""


def make_low_rank_layout(partition: Partition, matrices: Sequence[Matrix], rank: int) -> LowRankLayout:
    """The layout for data-parallel rank `rank` for a bucket with the `matrices` that `find_matrices` found."""
    names = {matrix.name for matrix in matrices}
    others, rest = select(partition, lambda segment: segment.parameter not in names)
    own = [segment for segment in partition.owned_by(rank) if segment.parameter in names]
    return LowRankLayout(
        stacks=tuple(_make_stack(group, own) for group in _groups(matrices)),
        others=others,
        rest=rest,
        p=even_partition([(f"{m.name}.P", math.prod(m.p_shape)) for m in matrices], partition.world_size),
        q=even_partition([(f"{m.name}.Q", math.prod(m.q_shape)) for m in matrices], partition.world_size),
        warm=even_partition([(m.name, math.prod(m.q_shape)) for m in matrices], 1).segments,
    )


def _groups(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """`matrices` of equal shapes, in their order, as many at once as make a stack."""
    for _, alike in groupby(matrices, key=lambda matrix: matrix.shape):
        found = list(alike)
        count = max(1, STACK_NUMEL // found[0].whole.numel)
        yield from (found[first : first + count] for first in range(0, len(found), count))


def _make_stack(matrices: Sequence[Matrix], own: Sequence[Segment]) -> Stack:
    names = {matrix.name for matrix in matrices}
    return Stack(tuple(matrices), tuple(segment for segment in own if segment.parameter in names))


def split(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Views of the consecutive parts of `flat` as tensors of `shapes`."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


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
