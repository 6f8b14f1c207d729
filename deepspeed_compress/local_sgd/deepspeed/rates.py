"""Learning rates of islands: what an island publishes with its anchor, and how an island that joins late catches up.

Schedules count steps, so an island that joins late advances its own schedule by as many steps as the others have taken.
With a schedule that is stepped by a metric (ReduceLROnPlateau), it takes over their state and rates instead. Then both
have the same rates, unless their programs or configurations differ; a warning then shows both.
"""

import inspect
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepspeed_compress.errors import CompressWarning, UnsupportedError

_POINTER = "/deepspeed_compress/islands"
_PROGRESS = frozenset(
    {"last_epoch", "last_batch_iteration", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter", "lr_lambdas"}
)
"""Keys in a schedule's state that change as it advances, or that do not describe its settings."""


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
        scheduler = self._engine.lr_scheduler
        self._published = {
            "step": self.step,
            "rates": rates_of(self._engine),
            "schedule": type(scheduler).__name__,
            "state": None if scheduler is None else _as_text(scheduler),
        }

    def published(self) -> Mapping[str, Any]:
        """Return the state that a joining island needs to have the same rates."""
        return self._published

    def catch_up(self, metadata: Mapping[str, Any]) -> None:
        """Advance the schedule to the step of the other islands, which published `metadata`.

        Raises:
            UnsupportedError: the schedule is stepped by a metric, and the others do not have the same one.
        """
        ahead, scheduler = int(metadata.get("step", 0)) - int(self._engine.global_steps), self._engine.lr_scheduler
        if scheduler is not None and ahead > self.ahead and _needs_metric(scheduler):
            self._take_over(scheduler, metadata)
        elif scheduler is not None:
            _step(scheduler, ahead - self.ahead)
        level = ahead >= self.ahead
        self.ahead = max(self.ahead, ahead)
        if "rates" in metadata and level:
            warn_of_unequal_rates(rates_of(self._engine), metadata["rates"], "the others")
            self._warn_of_another_schedule(metadata)
        self.update_snapshot()

    def _take_over(self, scheduler: Any, metadata: Mapping[str, Any]) -> None:
        kind, state, rates = type(scheduler).__name__, _from_text(metadata.get("state")), metadata.get("rates", [])
        groups = self._engine.optimizer.param_groups
        if metadata.get("schedule") != kind or state is None or len(rates) != len(groups):
            raise UnsupportedError(
                f"{_POINTER}/elastic: the schedule {kind} is stepped by a metric, so an island that joins late cannot "
                f"follow the others, which have {metadata.get('schedule', 'published no schedule')} (allowed: the same "
                "schedule in all islands that exchange in rounds, or a schedule of steps); write one of these"
            )
        scheduler.load_state_dict(state)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _warn_of_another_schedule(self, metadata: Mapping[str, Any]) -> None:
        own, theirs = self._engine.lr_scheduler, _from_text(metadata.get("state")) or {}
        kinds = (type(own).__name__, metadata.get("schedule"))
        if own is None or not theirs or kinds[0] != kinds[1]:
            return
        texts = list(_differences(_from_text(_as_text(own)) or {}, theirs))
        if texts:
            text = f"{_POINTER}: {kinds[0]} of this island has {', '.join(texts)}; write the same in all islands"
            warnings.warn(text, CompressWarning, stacklevel=2)


def _differences(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of two schedules that differ."""
    for key in sorted({*own} & {*theirs} - _PROGRESS):
        if not key.startswith("_") and own[key] != theirs[key]:
            yield f"{key} {own[key]!r}, and that of the others {theirs[key]!r}"


def _as_text(scheduler: Any) -> str | None:
    """Return the state of `scheduler` as JSON; None if it is not plain data.

    It is sent as a text, because it may hold infinity, which messages do not: the best metric before the first one.
    """
    try:
        return json.dumps(scheduler.state_dict())
    except (AttributeError, TypeError, ValueError):
        return None


def _from_text(text: Any) -> dict[str, Any] | None:
    """Return the state that `_as_text` returned on another island; None if there is none or it is malformed."""
    try:
        state = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
    return state if isinstance(state, dict) else None


def _needs_metric(scheduler: Any) -> bool:
    """Return True if `scheduler` is stepped with an argument."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(one.kind in positional and one.default is inspect.Parameter.empty for one in parameters)


def _step(scheduler: Any, times: int) -> None:
    with warnings.catch_warnings():
        # torch warns when a schedule is stepped before the optimizer.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(times):
            scheduler.step()
