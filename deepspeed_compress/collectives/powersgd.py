"""PowerSGD: matrices are approximated by two low-rank factors, and only the factors are reduced.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
(arXiv:1905.13727): algorithm 1 for each matrix with the warm start of section 4.2, algorithm 2 for error feedback.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import LAYOUTS, Partition
from deepspeed_compress.collectives.low_rank import (
    LowRank,
    LowRankLayout,
    Stack,
    clean,
    make_low_rank_layout,
    orthonormal,
    revived,
    split,
)
from deepspeed_compress.collectives.messages import Transfer
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.reducer import Reducer, reduce_at_once
from deepspeed_compress.compression.compressors.base import random_key
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import Segment, elements, gather, scatter


class PowerSGDReducer:
    """Reducer of matrices through `factors`, which all-reduces their factors, and of the rest by `others`.

    Both reducers have the same group. `low_rank` selects the matrices; a group of one rank, which sends nothing,
    approximates none.

    Per matrix, with n ranks: M = gradient + residual; P = mean of M Q, orthonormalized; Q = mean of M^T P. Every rank
    uses P Q^T as the mean and M - P Q^T as its next residual, so that the residuals and n P Q^T add up to the sum of
    the inputs. Without `residuals` there is no error feedback. The next step starts from Q, which is kept in `warm` and
    equal on all ranks; the seed of the run determines the first Q. Both stores follow the optimizer: their owner
    commits them or rolls them back.

    Each rank computes P Q^T from equal bits, so equal results require equal hardware and thread counts.
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
        """Random initial bases, by matrix. They are small, and bounded by the number of matrices of the model."""
        # Not a bound method: a reference cycle would keep the process group alive until garbage collection.
        used = low_rank if others.group.size() > 1 else replace(low_rank, shapes={})
        self.layout: Callable[[Partition], LowRankLayout] = lru_cache(maxsize=LAYOUTS)(
            partial(make_low_rank_layout, used, others.group.rank())
        )
        """Function that returns the division of a partition into stacks of matrices and the rest."""

    @property
    def group(self) -> ProcessGroup:
        return self.others.group

    start_reduce_scatter = reduce_at_once

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Replace this rank's own segments of `bucket` by `scale` times their sum; others keep their values.

        `bucket`: flat fp32, bf16 or fp16 [partition.numel].
        """
        self._reduce(bucket, partition, scale, everywhere=False)

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Replace all of `bucket` by `scale` times its sum over the ranks, with the same bits on every rank."""
        self._reduce(bucket, partition, scale, everywhere=True)

    def transfers(self, partition: Partition, everywhere: bool) -> tuple[Transfer, ...]:
        layout = self.layout(partition)
        factors = [self.factors.transfers(part, True) for part in (layout.p, layout.q) if part.segments]
        rest = self.others.transfers(layout.rest, everywhere)
        return tuple(one for found in (rest, *factors) for one in found)

    def _reduce(self, bucket: Tensor, partition: Partition, scale: float, everywhere: bool) -> None:
        """Reduce the elements outside matrices, as a separate bucket, and approximate the matrices."""
        layout = self.layout(partition)
        operation = self.others.all_reduce if everywhere else self.others.reduce_scatter
        if layout.others and layout.stacks:
            rest = gather(bucket, layout.others)
            operation(rest, layout.rest, scale)
            scatter(rest, layout.others, bucket)
        elif layout.others:
            operation(bucket, layout.rest, scale)
        if layout.stacks:
            wanted = [stack.whole if everywhere else stack.own for stack in layout.stacks]
            self._approximate(bucket, layout, scale, wanted)

    def _approximate(
        self, bucket: Tensor, layout: LowRankLayout, scale: float, wanted: Sequence[Sequence[Segment]]
    ) -> None:
        """Replace the `wanted` segments of each stack by `scale` times their sum, and update both stores.

        A non-finite element of a matrix on any rank leads to a non-finite element on every rank. Gradients and
        residuals are added three times, stack by stack, which costs less than writing the sums once and reading them
        twice.
        """
        meter, ranks, stacks = self.factors.run.meter, self.group.size(), layout.stacks
        p, q = (bucket.new_empty(part.numel, dtype=torch.float32) for part in (layout.p, layout.q))
        p_parts, q_parts = split(p, [stack.p_shape for stack in stacks]), split(q, [stack.q_shape for stack in stacks])
        with meter.phase("compress", bucket.device):
            for stack, start, out in zip(stacks, self._start_bases(layout, bucket.device), p_parts, strict=True):
                torch.bmm(start, self._matrices(bucket, stack).mT, out=out)
        self.factors.all_reduce(p, layout.p, 1 / ranks)
        with meter.phase("compress", bucket.device):
            cleaned, taints = zip(*(clean(part) for part in p_parts), strict=True)
            bases = [orthonormal(part) for part in cleaned]
            for stack, basis, out in zip(stacks, bases, q_parts, strict=True):
                torch.bmm(basis, self._matrices(bucket, stack), out=out)
        self.factors.all_reduce(q, layout.q, 1 / ranks)
        with meter.phase("decompress", bucket.device):
            for part, taint in zip(q_parts, taints, strict=True):
                part.add_(taint)
            self.warm.write(layout.warm, q)
            for stack, basis, factor, segments in zip(stacks, bases, q_parts, wanted, strict=True):
                self._store_residuals(bucket, stack, basis, factor)
                _deliver(bucket, stack, basis, factor * (scale * ranks), segments)

    def _matrices(self, bucket: Tensor, stack: Stack) -> Tensor:
        """Return this rank's gradients of a stack plus their residuals, as a new fp32 tensor [count, m, n]."""
        values = gather(bucket, stack.whole)
        if self.residuals is not None:
            self.residuals.add_to(values, stack.whole, 1.0)
        return values.view(stack.shape)

    def _store_residuals(self, bucket: Tensor, stack: Stack, basis: Tensor, factor: Tensor) -> None:
        """Store the part of a stack that the factors do not represent as its next residuals."""
        if self.residuals is not None:
            rest = self._matrices(bucket, stack).baddbmm_(basis.mT, factor, alpha=-1.0)
            self.residuals.write(stack.whole, rest.view(-1))

    def _start_bases(self, layout: LowRankLayout, device: torch.device) -> list[Tensor]:
        """Return an initial orthonormal basis per matrix: Q of the previous step, or a random one if there is none."""
        shapes = [stack.q_shape for stack in layout.stacks]
        warm = split(self.warm.read(layout.warm, device), shapes)
        fresh = split(torch.cat([self._start(segment, device) for segment in layout.warm]), shapes)
        return [orthonormal(revived(before, start)) for before, start in zip(warm, fresh, strict=True)]

    def _start(self, segment: Segment, device: torch.device) -> Tensor:
        """Return independent normal numbers that depend only on the seed and the parameter's name: fp32 [numel]."""
        if segment.parameter not in self._starts:
            key = random_key(self.factors.run.seed, zlib.crc32(segment.parameter.encode()))
            first, second = for_device(device).uniform(2 * segment.numel, key, device).view(2, -1)
            # The Box-Muller transform.
            normal = torch.sqrt(-2.0 * torch.log1p(-first)) * torch.cos(2.0 * math.pi * second)
            self._starts[segment.parameter] = normal
        return self._starts[segment.parameter]


def _deliver(bucket: Tensor, stack: Stack, basis: Tensor, factor: Tensor, segments: Sequence[Segment]) -> None:
    """Write P Q^T into the `segments` of a stack."""
    if segments:
        values = torch.bmm(basis.mT, factor).view(-1)
        scatter(elements(values, stack.inside(segments)), segments, bucket)
