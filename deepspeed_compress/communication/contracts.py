"""What reducers promise, what they ask of others, and how steps and messages are numbered."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import Partition
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.segments import Segment, gather

__all__ = [
    "LEVELS",
    "Delivery",
    "Done",
    "Landing",
    "Memory",
    "Messages",
    "Meter",
    "Pending",
    "Reducer",
    "StepClock",
    "reduce_at_once",
]

LEVELS = 8
"""Reducers of one run that number their messages independently of each other."""

Landing = Callable[[], None]
"""Waits for what is under way, and puts it into its place."""


class Pending(Protocol):
    """A reduce-scatter under way."""

    @property
    def own(self) -> Sequence[Segment]:
        """This rank's segments, in the order in which `finish` takes and gives their elements."""

    def finish(self, local: Tensor) -> Tensor:
        """`scale` times the sums of the own elements, flat fp32. `local`: what this rank has there (overwritten)."""


class Reducer(Protocol):
    """Sums buckets over the ranks of `group`, each segment for its owner or for all."""

    @property
    def group(self) -> ProcessGroup: ...

    def start_reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> Pending:
        """Begin a `reduce_scatter`; `bucket` may change afterwards. All ranks finish what they begin in one order."""

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None: ...

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None: ...


@dataclass(frozen=True)
class Done:
    """A reduce-scatter that was over when it was begun: the `sums` of the `own` segments."""

    own: Sequence[Segment]
    sums: Tensor

    def finish(self, local: Tensor) -> Tensor:
        return self.sums


def reduce_at_once(reducer: Reducer, bucket: Tensor, partition: Partition, scale: float) -> Done:
    """What `start_reduce_scatter` does where the reduction goes in several phases; `bucket` is overwritten."""
    reducer.reduce_scatter(bucket, partition, scale)
    own = partition.owned_by(reducer.group.rank())
    return Done(own, gather(bucket, own))


class Memory(Protocol):
    """What a sender keeps between messages (`feedback` has the kinds)."""

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int, codec: Codec) -> None:
        """Encode `x` (flat fp32, the elements of `segments`, not changed) and what is remembered of them."""

    def keep(self, x: Tensor, segments: Sequence[Segment], codec: Codec) -> Tensor | None:
        """What this rank adds to its own elements `x` (may be overwritten); None: what the others would decode."""


class Delivery(Protocol):
    """What is handed on of a sum that arrived (`feedback.Spread`)."""

    def deliver(self, total: Tensor, segments: Sequence[Segment], step: int) -> Tensor: ...


class Meter(Protocol):
    """Where bytes and times are counted (`monitor.Meter`)."""

    def count(self, kind: str, size: int) -> None: ...

    def phase(self, name: str, device: torch.device) -> AbstractContextManager[None]: ...


@dataclass
class StepClock:
    """Where the run is: `step` counts optimizer steps, `begun` those that this process has begun.

    `loss_scale` is the factor that the gradients of this step carry.
    """

    step: int = 0
    loss_scale: float = 1.0
    begun: int = 0

    def begin(self, step: int, loss_scale: float = 1.0) -> None:
        self.step, self.loss_scale, self.begun = step, loss_scale, self.begun + 1


@dataclass
class Messages:
    """Numbers the messages of one group within a step: 1, 2, 3 ... The ranks of the group number them alike.

    Every reducer has its own, because ranks of one group may take part in different numbers of others.
    """

    clock: StepClock
    _begun: int = -1
    _number: int = 0

    def next(self) -> int:
        self.skip(1)
        return self._number

    def skip(self, count: int) -> None:
        """As if `count` messages had been numbered."""
        self._number = self._number + count if self._begun == self.clock.begun else count
        self._begun = self.clock.begun
