"""Selection of matrices for low-rank approximation, the layout of their factors, and the algebra of a stack.

A stack is a set of matrices of one shape in a bucket, fp32 [count, m, n], few enough to stay in a cache. Factors are
stored transposed, P as [count, rank, m] and Q as [count, rank, n]. Products then run along contiguous rows (3 to 15
times faster on a CPU), and a codec that scales by blocks sees one basis vector at a time.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from deepspeed_compress.collectives.buckets import Partition, even_partition, select
from deepspeed_compress.compression.segments import Segment

Shape = tuple[int, ...]

STACK_NUMEL = 1 << 18
"""Maximum number of elements of a stack with several matrices, so that it stays in a cache."""


@dataclass(frozen=True)
class Matrix:
    """A parameter, `whole` in its bucket, viewed as [rows, columns] and approximated at `rank`."""

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


@dataclass(frozen=True)
class LowRank:
    """Selection of the parameters to approximate.

    Attributes:
        shapes: shapes of the candidates, by name.
        rank: rank of the factors.
        min_saving: factor by which the factors must be smaller than the matrix (strictly).
    """

    shapes: Mapping[str, Shape]
    rank: int
    min_saving: float = 1.0

    def saves(self, name: str) -> bool:
        """Return True if the factors of a parameter are smaller than it by more than `min_saving`."""
        shape = self.shapes.get(name, ())
        if len(shape) < 2:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return (rows + columns) * min(self.rank, rows, columns) * self.min_saving < rows * columns


def find_matrices(partition: Partition, low_rank: LowRank) -> tuple[Matrix, ...]:
    """Return the parameters of a bucket to approximate, sorted by shape.

    They are the parameters that `low_rank` selects, have two dimensions or more (viewed as [shape[0], -1]), and lie in
    the bucket with all their elements. The rank is capped at the smaller side.
    """
    found = []
    for name, group in groupby(partition.segments, key=lambda segment: segment.parameter):
        # The segments of a parameter may have different owners.
        run, shape = list(group), low_rank.shapes.get(name, ())
        whole = replace(run[0], numel=sum(segment.numel for segment in run))
        adjoin = all(after.begin == before.begin + before.numel for before, after in pairwise(run))
        if adjoin and (whole.begin, whole.numel) == (0, math.prod(shape)) and low_rank.saves(name):
            rows, columns = shape[0], math.prod(shape[1:])
            found.append(Matrix(whole, rows, columns, min(low_rank.rank, rows, columns)))
    return tuple(sorted(found, key=lambda matrix: matrix.shape))


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape and rank that are processed together. `own`: this rank's segments of them."""

    matrices: tuple[Matrix, ...]
    own: tuple[Segment, ...]

    @cached_property
    def whole(self) -> tuple[Segment, ...]:
        """Return the matrices as segments at their offsets in the bucket."""
        return tuple(matrix.whole for matrix in self.matrices)

    @property
    def shape(self) -> Shape:
        return len(self.matrices), *self.matrices[0].shape

    @property
    def p_shape(self) -> Shape:
        return len(self.matrices), self.matrices[0].rank, self.matrices[0].rows

    @property
    def q_shape(self) -> Shape:
        return len(self.matrices), self.matrices[0].rank, self.matrices[0].columns

    def inside(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return `segments` of these matrices, at their offsets in the flat elements of the stack."""
        numels = accumulate((one.numel for one in self.whole), initial=0)
        first = dict(zip((one.parameter for one in self.whole), numels, strict=False))
        return [replace(segment, offset=first[segment.parameter] + segment.begin) for segment in segments]


@dataclass(frozen=True)
class LowRankLayout:
    """Division of a bucket into stacks of matrices and the rest."""

    stacks: tuple[Stack, ...]
    others: tuple[Segment, ...]
    rest: Partition
    """The segments `others` as a separate bucket."""
    p: Partition
    q: Partition
    """Partitions of the factors P and Q, stack after stack. Names are those of the parameters plus ".P" or ".Q"."""
    warm: tuple[Segment, ...]
    """The whole Q of each matrix, under the name of the parameter."""


def make_low_rank_layout(low_rank: LowRank, rank: int, partition: Partition) -> LowRankLayout:
    """Return the layout of a bucket for data-parallel rank `rank`."""
    matrices = find_matrices(partition, low_rank)
    names = {matrix.name for matrix in matrices}
    others, rest = select(partition, lambda segment: segment.parameter not in names)
    own = [segment for segment in partition.owned_by(rank) if segment.parameter in names]
    return LowRankLayout(
        stacks=tuple(_stacks(matrices, own)),
        others=others,
        rest=rest,
        p=even_partition([(f"{m.name}.P", m.rank * m.rows) for m in matrices], partition.world_size),
        q=even_partition([(f"{m.name}.Q", m.rank * m.columns) for m in matrices], partition.world_size),
        warm=even_partition([(m.name, m.rank * m.columns) for m in matrices], 1).segments,
    )


def _stacks(matrices: Sequence[Matrix], own: Sequence[Segment]) -> Iterator[Stack]:
    """Yield stacks of consecutive `matrices` of equal shape, as large as a stack may be, with this rank's segments."""
    for _, alike in groupby(matrices, key=lambda matrix: matrix.shape):
        found = list(alike)
        count = max(1, STACK_NUMEL // found[0].whole.numel)
        for first in range(0, len(found), count):
            chosen = tuple(found[first : first + count])
            names = {matrix.name for matrix in chosen}
            yield Stack(chosen, tuple(segment for segment in own if segment.parameter in names))


def split(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Return views of the consecutive parts of `flat` as tensors of `shapes`."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def orthonormal(factors: Tensor) -> Tensor:
    """Return orthonormal row bases of the matrices in `factors` ([count, rank, length], rank <= length).

    `factors` must be finite. Uses the Householder QR of the transpose. The result is orthonormal even if rows are zero
    or dependent: each of those gets a new direction. There is no device synchronization.
    """
    basis: Tensor = torch.linalg.qr(factors.mT).Q
    return basis.mT


def revived(factors: Tensor, start: Tensor) -> Tensor:
    """Return `factors` with all-zero or non-finite rows replaced by the rows of `start` (of the same shape)."""
    largest = factors.abs().amax(dim=2, keepdim=True)
    return torch.where((largest > 0) & largest.isfinite(), factors, start)


def clean(factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return `factors` with every matrix that has a non-finite element set to zero, and a taint for derived values.

    The taint, [count, 1, 1], is NaN for those matrices and 0 for the others.
    """
    taint = (factors - factors).sum(dim=(1, 2), keepdim=True)
    return torch.where(taint == 0, factors, 0.0), taint
