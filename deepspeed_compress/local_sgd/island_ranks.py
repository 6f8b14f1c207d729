"""The ranks of one island, which act alike: all ranks follow what the first one receives and decides."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.errors import CompressError

__all__ = ["Cadence", "Team", "Word"]

T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The ranks of one island. `group` is their process group on the host; None for a single rank."""

    group: ProcessGroup | None = None

    @property
    def place(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def share(self, work: Callable[[], T]) -> T:
        """Return on all ranks what `work` returns on the first rank. Collective.

        A CompressError of `work` is raised on all ranks too.
        """
        result: list[Any] = [_attempted(work) if self.place == 0 else None]
        if self.group is not None:
            dist.broadcast_object_list(result, dist.get_global_rank(self.group, 0), group=self.group)
        value, error = result[0]
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every rank, on all ranks. Collective."""
        found = [value]
        if self.group is not None:
            found *= self.group.size()
            dist.all_gather_object(found, value, group=self.group)
        return found

    def tell(self, decision: bool) -> tuple[dist.Work, Tensor]:
        """Start to broadcast the first rank's decision in an island of several ranks; see `heard`. Collective."""
        assert self.group is not None, "nobody to tell"
        told = torch.tensor([float(decision)])
        first = dist.get_global_rank(self.group, 0)
        return dist.broadcast(told, first, group=self.group, async_op=True), told

    def heard(self, told: tuple[dist.Work, Tensor]) -> bool:
        """Wait for the broadcast of `tell` and return the first rank's decision."""
        told[0].wait()
        return bool(told[1])

    def same(self, value: int) -> bool:
        """Return True if all ranks have the same `value`, which must not be negative. Collective."""
        extremes = torch.tensor([value, -value])
        if self.group is not None:
            dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=self.group)
        return int(extremes[0]) == -int(extremes[1])

    def all(self, fine: bool) -> bool:
        """Return True if `fine` is True on all ranks. Collective."""
        found = torch.tensor([float(fine)])
        if self.group is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.group)
        return bool(found)


def _attempted(work: Callable[[], T]) -> tuple[T | None, CompressError | None]:
    try:
        return work(), None
    except CompressError as error:
        return None, error


class Word:
    """The first rank's decision after every step, which all ranks follow.

    In an island of several ranks, it is the decision of the previous step, which is broadcast in the background so that
    no rank waits for it.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._told: tuple[dist.Work, Tensor] | None = None

    def heard(self, own: bool) -> bool:
        """Return the decision to follow now. `own`: the first rank's new decision. Collective."""
        if self._team.group is None:
            return own
        earlier, self._told = self._told, self._team.tell(own)
        if earlier is None or not self._team.heard(earlier):
            return False
        self._team.heard(self._told)
        self._told = None
        return True


class Cadence:
    """Interval of an island's exchanges in steps or seconds. Used on the first rank."""

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self._steps, self._seconds = steps, seconds
        self.restart()

    def restart(self) -> None:
        self._taken, self._since = 0, time.monotonic()

    def step(self) -> bool:
        """Count a finished step, and return True if an exchange is due."""
        self._taken += 1
        if self._steps is not None:
            return self._taken >= self._steps
        return time.monotonic() - self._since >= (self._seconds or 0.0)
