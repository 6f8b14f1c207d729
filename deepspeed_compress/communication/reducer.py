"""What reducers promise, what all reducers of a run share, and how messages are numbered."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import Partition
from deepspeed_compress.communication.messages import Transfer
from deepspeed_compress.communication.pace import Pace
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import Segment, gather
from deepspeed_compress.monitor import Meter

__all__ = [
    "INSIDE_LEVEL",
    "LEVELS",
    "MessageCounter",
    "Pending",
    "Reduced",
    "Reducer",
    "Run",
    "StepClock",
    "reduce_at_once",
]

LEVELS = 8
"""Reducers of one run that number their messages independently of each other."""
INSIDE_LEVEL = 1
"""Of the messages that stay inside a node."""


class Pending(Protocol):
    """A reduce-scatter under way."""

    @property
    def own(self) -> Sequence[Segment]:
        """This rank's segments, in the order in which `finish` takes and gives their elements."""

    def finish(self, local: Tensor) -> Tensor:
        """Wait for what is under way.

        Args:
            local: flat fp32, what this rank has in its own segments; overwritten.

        Returns:
            Flat fp32 of the same length: `scale` times the sums over the ranks.
        """


class Reducer(Protocol):
    """Sums flat buckets over the ranks of `group`: each segment for its owner, or for all.

    A bucket is a flat fp32, bf16 or fp16 tensor [partition.numel] on the device of the run; sums are made in fp32, in
    the same order in every run. All ranks of the group call the same methods with equal partitions, in one order; a
    wrong length is an AssertionError. What a peer that is gone does, the backend says (RuntimeError of torch).

    Examples:
        On every rank of `group`:

        >>> partition = even_partition([("weight", 12), ("bias", 4)], group.size())
        >>> reducer.reduce_scatter(bucket, partition, scale=1 / group.size())
        >>> mean_of_my_part = gather(bucket, partition.owned_by(group.rank()))
    """

    @property
    def group(self) -> ProcessGroup:
        """The ranks that take part; owners in partitions are ranks of this group."""

    def start_reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> Pending:
        """Begin a `reduce_scatter`; `bucket` may change afterwards. All ranks finish what they begin in one order."""

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """This rank's own segments of `bucket` become `scale` times the sum over the ranks; what the others have is
        left as it is, or overwritten."""

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """All of `bucket` becomes `scale` times the sum over the ranks: the same bits on every rank."""

    def transfers(self, partition: Partition, everywhere: bool) -> tuple[Transfer, ...]:
        """What this rank sends to reduce a bucket cut by `partition`; `everywhere`: by `all_reduce`."""

    def stored(self, partition: Partition) -> tuple[tuple[Residuals, int], ...]:
        """What is kept between steps besides what the transfers keep: stores, with a number of elements."""


@dataclass(frozen=True)
class Reduced:
    """A reduce-scatter that was over when it was begun: the `sums` of the `own` segments."""

    own: Sequence[Segment]
    sums: Tensor

    def finish(self, local: Tensor) -> Tensor:
        return self.sums


def reduce_at_once(reducer: Reducer, bucket: Tensor, partition: Partition, scale: float) -> Reduced:
    """What `start_reduce_scatter` does where the reduction goes in several phases; `bucket` is overwritten."""
    reducer.reduce_scatter(bucket, partition, scale)
    own = partition.owned_by(reducer.group.rank())
    return Reduced(own, gather(bucket, own))


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


@dataclass(frozen=True)
class Run:
    """What all reducers of a run share: where it is, where bytes and times are counted, the seed of random numbers, and
    how fast messages may leave; None: as fast as it goes."""

    clock: StepClock
    meter: Meter
    seed: int = 0
    pace: Pace | None = None

    def wait_to_send(self, size: int) -> None:
        """Until a message of `size` bytes may leave this host."""
        if self.pace is not None:
            self.pace.wait(size)


@dataclass
class MessageCounter:
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
