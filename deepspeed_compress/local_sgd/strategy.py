"""Common parts of exchange strategies: inputs, ranks, results, and the intervals of islands that join and leave.

The ranks of an island act alike: all ranks follow what the first one receives and decides.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.objects import gather_objects, of_first
from deepspeed_compress.collectives.reduction import ReductionContext
from deepspeed_compress.config import Elastic, Islands
from deepspeed_compress.errors import CompressError, IslandError
from deepspeed_compress.local_sgd.exchange import MasterWeights
from deepspeed_compress.local_sgd.moments import SecondMoments

T = TypeVar("T")


@dataclass(frozen=True)
class IslandRanks:
    """The ranks of one island. `group` is their process group (elastic: on the host); None for a single rank."""

    group: ProcessGroup | None = None

    @property
    def place(self) -> int:
        """Return the position of this rank within the island."""
        return 0 if self.group is None else self.group.rank()

    def run_on_first(self, work: Callable[..., T], *args: Any) -> T:
        """Call `work(*args)` on the first rank, and return its result on all ranks. Collective.

        An error of `work` is raised on all ranks; on the others as an IslandError, unless it is a CompressError.
        """
        found: tuple[Any, Exception | None] = None, None
        problem: Exception | None = None
        if self.place == 0:
            try:
                found = work(*args), None
            except CompressError as error:
                found = None, error
            except Exception as error:  # whatever it is, the other ranks must be told
                problem = error
                found = None, IslandError(f"the first rank of this island has failed: {error!r}")
        result, told = found if self.group is None else of_first(found, self.group)
        if told is not None:
            raise problem or told
        return cast(T, result)

    def gather(self, value: T) -> list[T]:
        """Return the `value` of every rank, on all ranks. Collective."""
        return [value] if self.group is None else gather_objects(value, self.group)

    def all_equal(self, value: int) -> bool:
        """Return True if all ranks have the same `value`. Collective."""
        return len(set(self.gather(value))) == 1

    def all_true(self, value: bool) -> bool:
        """Return True if `value` is True on all ranks. Collective."""
        return all(self.gather(value))


@dataclass(frozen=True)
class ExchangeContext:
    """Inputs of any exchange strategy.

    Attributes:
        settings: the section's `islands`.
        master_weights: fp32 master weights of this rank.
        reduction: the residual stores and counters, over the ranks of equal place, or this rank alone if they change.
        ranks: the ranks of this island.
        moments: second moments of the optimizer, if they are exchanged.
        on_divergence: called when the master weights equal the anchor again after some were not finite.
    """

    settings: Islands
    master_weights: MasterWeights
    reduction: ReductionContext
    ranks: IslandRanks
    moments: SecondMoments | None = None
    on_divergence: Callable[[], object] = lambda: None

    @property
    def elastic(self) -> Elastic:
        """Return the section's `islands.elastic`."""
        assert self.settings.elastic is not None, "made for elastic islands"
        return self.settings.elastic


@dataclass(frozen=True)
class ExchangeResult:
    """Outcome of one exchange between islands.

    Attributes:
        kind: "exchange", "renewed" (the island was away and now has the newest anchor), "void" or "left_out".
        seconds: time for which training was blocked.
        round: number of the round; 0 if there was none.
        islands: number of islands in the round; 0 if there was none.
        reason: explanation if the outcome is not "exchange".
        weight: weight of this island's update relative to that of a single island; only for asynchronous exchanges.
        metadata: metadata that came with the anchor of another run.
    """

    kind: str
    seconds: float
    round: int = 0
    islands: int = 0
    reason: str = ""
    weight: float = 1.0
    metadata: Mapping[str, Any] = field(default_factory=dict)


class LeaderDecision:
    """Decision after every step, on which all ranks agree.

    Every rank makes some decisions by itself, from the number of steps. The others are made by the first rank. In an
    island of several ranks, these are followed one step later: they are broadcast in the background so that no rank
    waits for them.
    """

    def __init__(self, ranks: IslandRanks) -> None:
        self._group = ranks.group
        self._broadcast: tuple[dist.Work, Tensor] | None = None

    def follow(self, own: bool, is_known: bool) -> bool:
        """Return the decision to follow now. Collective.

        Args:
            own: the first rank's new decision.
            is_known: the decision that all ranks have made alike.
        """
        if self._group is None:
            return own or is_known
        if self.take() or is_known:
            return True
        new = torch.tensor([float(own)])
        self._broadcast = (dist.broadcast(new, group=self._group, async_op=True, group_src=0), new)
        return False

    def take(self) -> bool:
        """Wait for the broadcast in progress, and return its decision, which is then forgotten. Collective.

        Returns False if there is none.
        """
        broadcast, self._broadcast = self._broadcast, None
        if broadcast is None:
            return False
        work, decision = broadcast
        work.wait()
        return bool(decision)


class SyncInterval:
    """Interval between the exchanges of an island, in steps or seconds."""

    def __init__(self, steps: int | None, seconds: float | None) -> None:
        self._steps, self._seconds = steps, seconds
        self.restart()

    def restart(self) -> None:
        """Begin a new interval, as after an exchange."""
        self._steps_taken, self._begun = 0, time.monotonic()

    def count_step(self) -> bool:
        """Count a finished step, and return True if an exchange is due by the number of steps, alike on all ranks."""
        self._steps_taken += 1
        return self._steps is not None and self._steps_taken >= self._steps

    def has_elapsed(self) -> bool:
        """Return True if an exchange is due by the clock of this rank."""
        return self._seconds is not None and time.monotonic() - self._begun >= self._seconds

    def describe(self) -> dict[str, float]:
        """Return the steps and seconds since the last exchange, for `resume`."""
        return {"steps": self._steps_taken, "seconds": time.monotonic() - self._begun}

    def resume(self, saved: Mapping[str, float] | None) -> None:
        """Continue the interval that `describe` returned when a checkpoint was saved; None begins a new one."""
        self.restart()
        if saved is not None:
            self._steps_taken = int(saved["steps"])
            self._begun -= saved["seconds"]
