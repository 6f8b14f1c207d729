"""Learning rates of islands: what an island publishes with its anchor, and how an island that joins late catches up.

Schedules count steps, so an island that joins late advances its own schedule by as many steps as the others have taken.
Then both have the same rates, unless their programs or configurations differ; a warning then shows both.
"""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_compress.errors import CompressWarning, UnsupportedError

_POINTER = "/deepspeed_compress/islands"


def rates_of(engine: Any) -> list[float]:
    """Return the learning rate of each parameter group."""
    return [float(group["lr"]) for group in engine.optimizer.param_groups]


def warn_of_unequal_rates(own: Sequence[float], theirs: Sequence[float], whose: str) -> None:
    """Warn (CompressWarning) if the rates of this island differ from those of `whose`, by more than 1e-6 relative."""
    if len(own) == len(theirs) and all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(own, theirs, strict=True)):
        return
    text = (
        f"{_POINTER}: the learning rates of this island are {list(own)}, and those of {whose} {list(theirs)}, at the "
        "same step: give all islands the same optimizer and schedule, and step schedules through the engine"
    )
    warnings.warn(text, CompressWarning, stacklevel=2)


class LearningRates:
    """The learning rates and the schedule of one engine.

    Attributes:
        ahead: number of steps by which the schedule is ahead of those of the engine.
    """

    def __init__(self, engine: Any) -> None:
        self._engine, self.ahead = engine, 0
        self.update_snapshot()

    @property
    def step(self) -> int:
        """Return the step of the schedule."""
        return int(self._engine.global_steps) + self.ahead

    def update_snapshot(self) -> None:
        """Update the snapshot that `published` returns; a thread serves it, possibly in the middle of a step."""
        self._published = {"step": self.step, "rates": rates_of(self._engine)}

    def published(self) -> Mapping[str, Any]:
        """Return the state that a joining island needs to have the same rates."""
        return self._published

    def catch_up(self, metadata: Mapping[str, Any]) -> None:
        """Advance the schedule to the step of the other islands, which published `metadata`.

        Raises:
            UnsupportedError: the others are ahead, and the schedule is stepped by a metric (ReduceLROnPlateau).
        """
        ahead, scheduler = int(metadata.get("step", 0)) - int(self._engine.global_steps), self._engine.lr_scheduler
        behind, is_level = ahead - self.ahead, ahead >= self.ahead
        if scheduler is not None and behind > 0:
            try:
                inspect.signature(scheduler.step).bind()
            except TypeError as error:
                raise UnsupportedError(
                    f"{_POINTER}/elastic: this island is {behind} steps behind the others, and "
                    f"{type(scheduler).__name__}.step is {error} (allowed: schedules that count steps); write such "
                    "a schedule, or start all islands at once"
                ) from error
            # torch warns when a schedule is stepped before the optimizer.
            with warnings.catch_warnings(action="ignore", category=UserWarning):
                for _ in range(behind):
                    scheduler.step()
        self.ahead = max(self.ahead, ahead)
        if "rates" in metadata and is_level:
            warn_of_unequal_rates(rates_of(self._engine), metadata["rates"], "the others")
        self.update_snapshot()
