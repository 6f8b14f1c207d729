"""The ranks of one island, which act alike: all ranks follow what the first one receives and decides."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.errors import CompressError, IslandError

T = TypeVar("T")


@dataclass(frozen=True)
class IslandRanks:
    """The ranks of one island. `group` is their process group on the host; None for a single rank."""

    group: ProcessGroup | None = None

    @property
    def place(self) -> int:
        """Return the position of this rank within the island."""
        return 0 if self.group is None else self.group.rank()

    def run_on_first(self, work: Callable[..., T], *args: Any) -> T:
        """Call `work(*args)` on the first rank, and return its result on all ranks. Collective.

        An error of `work` is raised on all ranks; on the others as an IslandError, unless it is a CompressError.
        """
        value: T | None = None
        problem: Exception | None = None
        if self.place == 0:
            try:
                value = work(*args)
            except Exception as error:  # whatever it is, the other ranks must be told
                problem = error
        told: list[Any] = [(value, _portable(problem))]
        if self.group is not None:
            dist.broadcast_object_list(told, dist.get_global_rank(self.group, 0), group=self.group)
        result: T = told[0][0]
        if told[0][1] is not None:
            raise problem or told[0][1]
        return result

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every rank, on all ranks. Collective."""
        return [value] if self.group is None else gather_objects(value, self.group)

    def all_equal(self, value: int) -> bool:
        """Return True if all ranks have the same `value`, which must not be negative. Collective."""
        extremes = torch.tensor([value, -value])
        if self.group is not None:
            dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=self.group)
        return int(extremes[0]) == -int(extremes[1])

    def all_true(self, value: bool) -> bool:
        """Return True if `value` is True on all ranks. Collective."""
        found = torch.tensor([float(value)])
        if self.group is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group)
        return bool(found)


def _portable(error: Exception | None) -> CompressError | None:
    """Return `error` in a form that can be sent to other ranks."""
    if error is None or isinstance(error, CompressError):
        return error
    return IslandError(f"the first rank of this island has failed: {error!r}")


class LeaderDecision:
    """The first rank's decision after every step, which all ranks follow.

    In an island of several ranks, it is the decision of the previous step, which is broadcast in the background so that
    no rank waits for it.
    """

    def __init__(self, ranks: IslandRanks) -> None:
        self._group = ranks.group
        self._broadcast: tuple[dist.Work, Tensor] | None = None

    def follow(self, own: bool) -> bool:
        """Return the decision to follow now. Collective.

        Args:
            own: the first rank's new decision.
        """
        if self._group is None:
            return own
        earlier, new = self._broadcast, torch.tensor([float(own)])
        first = dist.get_global_rank(self._group, 0)
        self._broadcast = (dist.broadcast(new, first, group=self._group, async_op=True), new)
        if earlier is None or not _wait_for(earlier):
            return False
        _wait_for(self._broadcast)
        self._broadcast = None
        return True


def _wait_for(broadcast: tuple[dist.Work, Tensor]) -> bool:
    """Wait for a broadcast, and return the decision of the first rank."""
    work, decision = broadcast
    work.wait()
    return bool(decision)


class SyncInterval:
    """Interval between the exchanges of an island, in steps or seconds. Used on the first rank."""

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self._steps, self._seconds = steps, seconds
        self.restart()

    def restart(self) -> None:
        """Begin a new interval, as after an exchange."""
        self._steps_taken, self._begun = 0, time.monotonic()

    def count_step(self) -> bool:
        """Count a finished step, and return True if an exchange is due."""
        self._steps_taken += 1
        if self._steps is not None:
            return self._steps_taken >= self._steps
        return time.monotonic() - self._begun >= (self._seconds or 0.0)
