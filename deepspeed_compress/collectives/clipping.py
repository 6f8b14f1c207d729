"""Clipping of each rank's own gradients before they are compressed."""

from itertools import groupby

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.messages import Transfer
from deepspeed_compress.collectives.reducer import Pending, Reducer, StepClock
from deepspeed_compress.compression.residuals import Residuals


class ClippingReducer:
    """Reducer that clips the gradient of every parameter to the L2 norm `clip_norm` and passes it to `reducer`.

    Local gradient clipping of Lin et al., "Deep Gradient Compression" (arXiv:1712.01887, section 3.2), per tensor. A
    bucket must hold whole parameters. Its elements that this rank does not own are overwritten. The norm refers to
    unscaled gradients: the limit is multiplied by the clock's loss scale.
    """

    def __init__(self, reducer: Reducer, clip_norm: float, clock: StepClock) -> None:
        self.reducer = reducer
        self.clip_norm = clip_norm
        self.clock = clock

    @property
    def group(self) -> ProcessGroup:
        return self.reducer.group

    def start_reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> Pending:
        self._clip(bucket, partition)
        return self.reducer.start_reduce_scatter(bucket, partition, scale)

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        self._clip(bucket, partition)
        self.reducer.reduce_scatter(bucket, partition, scale)

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        self._clip(bucket, partition)
        self.reducer.all_reduce(bucket, partition, scale)

    def transfers(self, partition: Partition, everywhere: bool) -> tuple[Transfer, ...]:
        return self.reducer.transfers(partition, everywhere)

    def stored(self, partition: Partition) -> tuple[tuple[Residuals, int], ...]:
        return self.reducer.stored(partition)

    def _clip(self, bucket: Tensor, partition: Partition) -> None:
        limit, offset = self.clip_norm * self.clock.loss_scale, 0
        for _, segments in groupby(partition.segments, lambda segment: segment.parameter):
            numel = sum(segment.numel for segment in segments)
            gradient = bucket[offset : offset + numel]
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            # A NaN norm leaves a NaN gradient; an infinite one makes its infinite elements NaN.
            gradient.mul_(torch.clamp(limit / norm, max=1.0).to(gradient.dtype))
            offset += numel
