"""PowerSGD: matrices travel as two low-rank factors, and the factors are reduced instead of the matrices.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv:1905.13727): algorithm 1 for each matrix with the warm start of section 4.2, algorithm 2 for error feedback.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import LAYOUTS, Partition
from deepspeed_compress.communication.contracts import Pending, Reducer, reduce_at_once
from deepspeed_compress.communication.low_rank import (
    LowRankPlan,
    clean,
    find_matrices,
    make_low_rank_plan,
    orthonormal,
    products,
    revived,
    stacks,
)
from deepspeed_compress.communication.payload import PayloadReducer
from deepspeed_compress.compression.compressors.base import random_key
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.segments import Segment, gather, scatter

__all__ = ["PowerSGDReducer"]


class Store(Protocol):
    """Values by parameter range, zeros at first (`residuals.Residuals`)."""

    def read(self, segments: Sequence[Segment], device: torch.device) -> Tensor: ...

    def add_to(self, x: Tensor, segments: Sequence[Segment], factor: float) -> None: ...

    def write(self, segments: Sequence[Segment], values: Tensor) -> None: ...


class PowerSGDReducer:
    """Reduces matrices through `factors`, which all-reduces their low-rank factors, and the rest by `others`.

    Both reducers have the same group. `shapes`: of all parameters, by name. Which of those in a bucket are approximated
    at `rank`, and the part that `chosen` and `min_saving` have in it, says `low_rank.find_matrices`; none in a group
    of one rank, where nothing travels.

    Per matrix, with n ranks: M = gradient + residual; P = mean of M Q, orthonormalised; Q = mean of M^T P; every rank
    takes P Q^T as the mean, and M - P Q^T as its next residual, so that the residuals and n P Q^T add up to what went
    in. Without `residuals` there is no feedback. The next step starts from Q, kept in `warm`, equal on all ranks;
    `seed` gives the first one. Both stores follow the optimizer: their owner commits them or rolls back.

    Each rank computes P Q^T by itself from equal bits, so equal results need equal machines and thread counts.
    """

    def __init__(
        self,
        others: Reducer,
        factors: PayloadReducer,
        shapes: Mapping[str, tuple[int, ...]],
        rank: int,
        residuals: Store | None,
        warm: Store,
        chosen: Callable[[str], bool],
        seed: int = 0,
        min_saving: float = 1.0,
    ) -> None:
        self.others = others
        self.factors = factors
        self.shapes = shapes
        self.rank = rank
        self.residuals = residuals
        self.warm = warm
        self.chosen = chosen
        self.seed = seed
        self._starts: dict[str, Tensor] = {}
        """Random bases by matrix: few numbers each, and no more than the model has matrices."""
        wanted = chosen if others.group.size() > 1 else _nobody
        self.plan: Callable[[Partition], LowRankPlan] = lru_cache(maxsize=LAYOUTS)(
            partial(_make_plan, shapes, wanted, rank, min_saving, others.group.rank())
        )
        """How a partition is divided."""

    @property
    def group(self) -> ProcessGroup:
        return self.others.group

    def start_reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> Pending:
        """See `Reducer`; it is over at once, because every phase needs the one before."""
        return reduce_at_once(self, bucket, partition, scale)

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """This rank's own segments of `bucket` become `scale` times the sum over the ranks; others keep their values.

        `bucket`: flat fp32, bf16 or fp16 [partition.numel].
        """
        plan = self.plan(partition)
        if plan.rest.segments:
            _reduce_rest(self.others.reduce_scatter, bucket, partition, plan, scale)
        if plan.whole:
            total = self._approximated(bucket, partition).mul_(scale * self.group.size())
            scatter(gather(total, plan.own_values), plan.own, bucket)

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """All of `bucket` becomes `scale` times the sum over the ranks, the same bits on every rank."""
        plan = self.plan(partition)
        if plan.rest.segments:
            _reduce_rest(self.others.all_reduce, bucket, partition, plan, scale)
        if plan.whole:
            scatter(self._approximated(bucket, partition).mul_(scale * self.group.size()), plan.whole, bucket)

    def _approximated(self, bucket: Tensor, partition: Partition) -> Tensor:
        """The mean of the matrices, flat fp32, stack after stack; moves both stores on.

        A non-finite element of a matrix, on any rank, leaves a non-finite one on every rank.
        """
        plan, meter, device, share = self.plan(partition), self.factors.meter, bucket.device, 1 / self.group.size()
        with meter.phase("compress", device):
            values = self._with_residuals(bucket, plan)
            matrices = stacks(values, plan.shapes)
            p = products(self._start_bases(partition, device), [matrix.mT for matrix in matrices])
        self.factors.all_reduce(p, plan.p, share)
        with meter.phase("compress", device):
            cleaned, taints = zip(*(clean(stack) for stack in stacks(p, plan.p_shapes)), strict=True)
            bases = [orthonormal(stack) for stack in cleaned]
            q = products(bases, matrices)
        self.factors.all_reduce(q, plan.q, share)
        with meter.phase("decompress", device):
            factors = [q_of.add_(taint) for q_of, taint in zip(stacks(q, plan.q_shapes), taints, strict=True)]
            mean = products([basis.mT for basis in bases], factors)
            self.warm.write(plan.warm, q)
            if self.residuals is not None:
                self.residuals.write(plan.whole, values.sub_(mean))
        return mean

    def _with_residuals(self, bucket: Tensor, plan: LowRankPlan) -> Tensor:
        """This rank's gradients of the matrices and what is left of earlier ones: new, flat fp32."""
        values = gather(bucket, plan.whole)
        if self.residuals is not None:
            self.residuals.add_to(values, plan.whole, 1.0)
        return values

    def _start_bases(self, partition: Partition, device: torch.device) -> list[Tensor]:
        """An orthonormal basis for each matrix to begin with: Q of the step before, or random where there is none."""
        plan = self.plan(partition)
        warm = stacks(self.warm.read(plan.warm, device), plan.q_shapes)
        fresh = stacks(torch.cat([self._start(segment, device) for segment in plan.warm]), plan.q_shapes)
        return [orthonormal(revived(before, start)) for before, start in zip(warm, fresh, strict=True)]

    def _start(self, segment: Segment, device: torch.device) -> Tensor:
        """Independent normal numbers, which depend on the seed and the name alone: fp32 [numel]."""
        if segment.parameter not in self._starts:
            key = random_key(self.seed, zlib.crc32(segment.parameter.encode()))
            self._starts[segment.parameter] = _normal(segment.numel, key, device)
        return self._starts[segment.parameter]


def _normal(numel: int, key: int, device: torch.device) -> Tensor:
    """By the method of Box and Muller: fp32 [numel]."""
    first, second = for_device(device).uniform(2 * numel, key, device).view(2, -1)
    return torch.sqrt(-2.0 * torch.log1p(-first)) * torch.cos(2.0 * math.pi * second)


def _nobody(name: str) -> bool:
    return False


def _make_plan(
    shapes: Mapping[str, tuple[int, ...]],
    chosen: Callable[[str], bool],
    rank: int,
    min_saving: float,
    own: int,
    partition: Partition,
) -> LowRankPlan:
    return make_low_rank_plan(partition, find_matrices(partition, shapes, chosen, rank, min_saving), own)


def _reduce_rest(
    operation: Callable[[Tensor, Partition, float], None],
    bucket: Tensor,
    partition: Partition,
    plan: LowRankPlan,
    scale: float,
) -> None:
    """`operation` on the elements outside matrices, as a bucket of their own."""
    if not plan.whole:
        operation(bucket, partition, scale)
        return
    rest = gather(bucket, plan.others)
    operation(rest, plan.rest, scale)
    scatter(rest, plan.others, bucket)
