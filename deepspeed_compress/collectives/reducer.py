"""The interface of reducers, the state that all reducers of a run share, and the numbering of messages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.messages import Transfer
from deepspeed_compress.collectives.pace import Pace
from deepspeed_compress.compression.segments import Segment, gather
from deepspeed_compress.monitor import Meter

CHUNK_NUMEL: Mapping[str, int] = {"cpu": 1 << 20, "cuda": 1 << 25}
"""Elements of each rank that are encoded at once, by type of device.

On a CPU they stay in a cache between passes, and the next message is encoded while one is sent. A GPU encodes much
faster than any network sends, but starting a few programs takes it as long as encoding millions of elements.
"""
LEVELS = 8
"""Maximum number of reducers in one run that number their messages independently."""
INSIDE_LEVEL = 1
"""Level of messages that stay inside a node."""


def chunk_numel(device: torch.device) -> int:
    """Return the elements of each rank that are encoded at once on `device`; those of a CPU if it has no kernels."""
    return CHUNK_NUMEL.get(device.type, CHUNK_NUMEL["cpu"])


class Pending(Protocol):
    """Handle of a reduce-scatter in progress."""

    @property
    def own(self) -> Sequence[Segment]:
        """Return this rank's segments, in the order of the elements that `finish` takes and returns."""

    def finish(self, local: Tensor) -> Tensor:
        """Wait for the messages in progress and add them.

        Args:
            local: this rank's values of its own segments, flat fp32; overwritten.

        Returns:
            `scale` times the sums over the ranks, flat fp32 of the same length.
        """


class Reducer(Protocol):
    """Interface for summing flat buckets over the ranks of `group`, each segment for its owner or for all ranks.

    A bucket is a flat fp32, bf16 or fp16 tensor [partition.numel] on the device of the run. Sums are computed in fp32,
    in the same order in every run. All ranks of the group must call the same methods with equal partitions in the same
    order. A wrong length raises AssertionError. A lost peer raises the RuntimeError of the torch backend.

    Examples:
        On every rank of `group`:

        >>> partition = even_partition([("weight", 12), ("bias", 4)], group.size())
        >>> reducer.reduce_scatter(bucket, partition, scale=1 / group.size())
        >>> mean_of_my_part = gather(bucket, partition.owned_by(group.rank()))
    """

    @property
    def group(self) -> ProcessGroup:
        """Return the participating ranks. Owners in partitions are ranks of this group."""

    def start_reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> Pending:
        """Start a `reduce_scatter` and return its handle.

        `bucket` may change afterwards. All ranks must finish their pending reductions in the same order.
        """

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Replace this rank's own segments of `bucket` by `scale` times their sum over the ranks.

        The segments of other ranks are left as they are, or overwritten.
        """

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Replace all of `bucket` by `scale` times its sum over the ranks, with the same bits on every rank."""

    def transfers(self, partition: Partition, everywhere: bool) -> tuple[Transfer, ...]:
        """Return what this rank sends to reduce a bucket cut by `partition`, by `all_reduce` if `everywhere`."""


@dataclass(frozen=True)
class Reduced:
    """Handle of a reduce-scatter that completed at its start, with the `sums` of the `own` segments."""

    own: Sequence[Segment]
    sums: Tensor

    def finish(self, local: Tensor) -> Tensor:
        return self.sums


def reduce_at_once(reducer: Reducer, bucket: Tensor, partition: Partition, scale: float) -> Reduced:
    """Implement `start_reduce_scatter` for reducers that work in several phases. `bucket` is overwritten."""
    reducer.reduce_scatter(bucket, partition, scale)
    own = partition.owned_by(reducer.group.rank())
    return Reduced(own, gather(bucket, own))


@dataclass
class StepClock:
    """Progress of the run.

    Attributes:
        step: number of the optimizer step.
        loss_scale: factor that the gradients of this step carry.
        begun: number of steps that this process has begun.
    """

    step: int = 0
    loss_scale: float = 1.0
    begun: int = 0

    def begin(self, step: int, loss_scale: float = 1.0) -> None:
        self.step, self.loss_scale, self.begun = step, loss_scale, self.begun + 1


@dataclass(frozen=True)
class Run:
    """State that all reducers of a run share.

    Attributes:
        clock: progress of the run.
        meter: counter of bytes and times.
        seed: seed of random numbers.
        pace: rate limit of messages; None for no limit.
        chunk_numel: elements of each rank that are encoded at once; see `CHUNK_NUMEL`.
    """

    clock: StepClock
    meter: Meter
    seed: int = 0
    pace: Pace | None = None
    chunk_numel: int = CHUNK_NUMEL["cpu"]

    def wait_to_send(self, size: int) -> None:
        """Block until a message of `size` bytes may leave this host."""
        if self.pace is not None:
            self.pace.wait(size)

    @contextmanager
    def sending(self, traffic: str, size: int, device: torch.device, inside: bool = False) -> Iterator[None]:
        """Count the bytes that the block sends to other ranks. Outside of a node, wait for the rate limit first."""
        self.meter.count(traffic, size)
        with self.meter.phase("communicate", device):
            if not inside:
                self.wait_to_send(size)
            yield


@dataclass
class MessageCounter:
    """Counter of the messages of one group within a step: 1, 2, 3 ... Equal on all ranks of the group.

    Every reducer has its own counter, because the ranks of one group may take part in different numbers of other
    groups.
    """

    clock: StepClock
    _begun: int = -1
    _number: int = 0

    def next(self) -> int:
        self.skip(1)
        return self._number

    def skip(self, count: int) -> None:
        """Advance as if `count` messages had been numbered."""
        self._number = self._number + count if self._begun == self.clock.begun else count
        self._begun = self.clock.begun


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

    def _clip(self, bucket: Tensor, partition: Partition) -> None:
        limit, offset = self.clip_norm * self.clock.loss_scale, 0
        for _, segments in groupby(partition.segments, lambda segment: segment.parameter):
            numel = sum(segment.numel for segment in segments)
            gradient = bucket[offset : offset + numel]
            norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
            # A NaN norm leaves a NaN gradient; an infinite one makes its infinite elements NaN.
            gradient.mul_(torch.clamp(limit / norm, max=1.0).to(gradient.dtype))
            offset += numel
