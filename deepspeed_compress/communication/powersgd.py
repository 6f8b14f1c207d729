"""PowerSGD: matrices travel as two low-rank factors, and the factors are reduced instead of the matrices.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv:1905.13727): algorithm 1 for each matrix with the warm start of section 4.2, algorithm 2 for error feedback.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import LAYOUTS, Partition
from deepspeed_compress.communication.low_rank import (
    LowRank,
    LowRankLayout,
    clean,
    find_matrices,
    make_low_rank_layout,
    orthonormal,
    products,
    revived,
    stacks,
)
from deepspeed_compress.communication.messages import Transfer
from deepspeed_compress.communication.payload import PayloadReducer
from deepspeed_compress.communication.reducer import Pending, Reducer, reduce_at_once
from deepspeed_compress.compression.compressors.base import random_key
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import Segment, gather, scatter

__all__ = ["PowerSGDReducer"]


class PowerSGDReducer:
    """Reduces matrices through `factors`, which all-reduces their low-rank factors, and the rest by `others`.

    Both reducers have the same group. `low_rank` says what is approximated; nothing in a group of one rank, where
    nothing travels.

    Per matrix, with n ranks: M = gradient + residual; P = mean of M Q, orthonormalised; Q = mean of M^T P; every rank
    takes P Q^T as the mean, and M - P Q^T as its next residual, so that the residuals and n P Q^T add up to what went
    in. Without `residuals` there is no feedback. The next step starts from Q, kept in `warm`, equal on all ranks;
    the seed of the run gives the first one. Both stores follow the optimizer: their owner commits them or rolls back.

    Each rank computes P Q^T by itself from equal bits, so equal results need equal machines and thread counts.
    """

    def __init__(
        self,
        others: Reducer,
        factors: PayloadReducer,
        low_rank: LowRank,
        residuals: Residuals | None,
        warm: Residuals,
    ) -> None:
        self.others = others
        self.factors = factors
        self.low_rank = low_rank
        self.residuals = residuals
        self.warm = warm
        self._starts: dict[str, Tensor] = {}
        """Random bases by matrix: few numbers each, and no more than the model has matrices."""
        # Not a method of this object: a cycle would keep the process group until the garbage is collected.
        used = low_rank if others.group.size() > 1 else replace(low_rank, shapes={})
        self._layout = lru_cache(maxsize=LAYOUTS)(partial(_make_layout, used, others.group.rank()))

    def layout(self, partition: Partition) -> LowRankLayout:
        """How a partition is divided."""
        return self._layout(partition)

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
        layout = self.layout(partition)
        if layout.rest.segments:
            _reduce_rest(self.others.reduce_scatter, bucket, partition, layout, scale)
        if layout.whole:
            total = self._approximated(bucket, partition).mul_(scale * self.group.size())
            scatter(gather(total, layout.own_values), layout.own, bucket)

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """All of `bucket` becomes `scale` times the sum over the ranks, the same bits on every rank."""
        layout = self.layout(partition)
        if layout.rest.segments:
            _reduce_rest(self.others.all_reduce, bucket, partition, layout, scale)
        if layout.whole:
            scatter(self._approximated(bucket, partition).mul_(scale * self.group.size()), layout.whole, bucket)

    def transfers(self, partition: Partition, everywhere: bool) -> tuple[Transfer, ...]:
        layout = self.layout(partition)
        factors = [self.factors.transfers(part, True) for part in (layout.p, layout.q) if part.segments]
        rest = self.others.transfers(layout.rest, everywhere)
        return tuple(one for found in (rest, *factors) for one in found)

    def stored(self, partition: Partition) -> tuple[tuple[Residuals, int], ...]:
        layout = self.layout(partition)
        matrices = sum(segment.numel for segment in layout.whole)
        residuals = () if self.residuals is None else ((self.residuals, matrices),)
        return (*residuals, (self.warm, layout.q.numel), *self.others.stored(layout.rest))

    def _approximated(self, bucket: Tensor, partition: Partition) -> Tensor:
        """The mean of the matrices, flat fp32, stack after stack; moves both stores on.

        A non-finite element of a matrix, on any rank, leaves a non-finite one on every rank.
        """
        layout, meter, device = self.layout(partition), self.factors.run.meter, bucket.device
        share = 1 / self.group.size()
        with meter.phase("compress", device):
            values = self._with_residuals(bucket, layout)
            matrices = stacks(values, layout.shapes)
            p = products(self._start_bases(partition, device), [matrix.mT for matrix in matrices])
        self.factors.all_reduce(p, layout.p, share)
        with meter.phase("compress", device):
            cleaned, taints = zip(*(clean(stack) for stack in stacks(p, layout.p_shapes)), strict=True)
            bases = [orthonormal(stack) for stack in cleaned]
            q = products(bases, matrices)
        self.factors.all_reduce(q, layout.q, share)
        with meter.phase("decompress", device):
            factors = [q_of.add_(taint) for q_of, taint in zip(stacks(q, layout.q_shapes), taints, strict=True)]
            mean = products([basis.mT for basis in bases], factors)
            self.warm.write(layout.warm, q)
            if self.residuals is not None:
                self.residuals.write(layout.whole, values.sub_(mean))
        return mean

    def _with_residuals(self, bucket: Tensor, layout: LowRankLayout) -> Tensor:
        """This rank's gradients of the matrices and what is left of earlier ones: new, flat fp32."""
        values = gather(bucket, layout.whole)
        if self.residuals is not None:
            self.residuals.add_to(values, layout.whole, 1.0)
        return values

    def _start_bases(self, partition: Partition, device: torch.device) -> list[Tensor]:
        """An orthonormal basis for each matrix to begin with: Q of the step before, or random where there is none."""
        layout = self.layout(partition)
        warm = stacks(self.warm.read(layout.warm, device), layout.q_shapes)
        fresh = stacks(torch.cat([self._start(segment, device) for segment in layout.warm]), layout.q_shapes)
        return [orthonormal(revived(before, start)) for before, start in zip(warm, fresh, strict=True)]

    def _start(self, segment: Segment, device: torch.device) -> Tensor:
        """Independent normal numbers, which depend on the seed and the name alone: fp32 [numel]."""
        if segment.parameter not in self._starts:
            key = random_key(self.factors.run.seed, zlib.crc32(segment.parameter.encode()))
            self._starts[segment.parameter] = _normal(segment.numel, key, device)
        return self._starts[segment.parameter]


def _normal(numel: int, key: int, device: torch.device) -> Tensor:
    """By the method of Box and Muller: fp32 [numel]."""
    first, second = for_device(device).uniform(2 * numel, key, device).view(2, -1)
    return torch.sqrt(-2.0 * torch.log1p(-first)) * torch.cos(2.0 * math.pi * second)


def _make_layout(low_rank: LowRank, own: int, partition: Partition) -> LowRankLayout:
    return make_low_rank_layout(partition, find_matrices(partition, low_rank), own)


def _reduce_rest(
    operation: Callable[[Tensor, Partition, float], None],
    bucket: Tensor,
    partition: Partition,
    layout: LowRankLayout,
    scale: float,
) -> None:
    """`operation` on the elements outside matrices, as a bucket of their own."""
    if not layout.whole:
        operation(bucket, partition, scale)
        return
    rest = gather(bucket, layout.others)
    operation(rest, layout.rest, scale)
    scatter(rest, layout.others, bucket)
