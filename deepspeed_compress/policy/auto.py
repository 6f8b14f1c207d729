"""The decider of `auto`: compressed steps, or uncompressed ones of the engine alone, whichever take less time.

Both kinds take turns, a few steps at a time: U U U U C C C C U U U U C C C C ... Each change of kind gives a pair: the
last step before it, and the first later one that feels nothing of it any more. Every second pair begins with the other
kind (ABBA), so what makes all steps slower or faster meanwhile (a slow start, a warmer processor) cancels out.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from deepspeed_compress.choice_names import NOW, TIMES
from deepspeed_compress.config import CompressConfig, brief
from deepspeed_compress.config.places import NoneGradients
from deepspeed_compress.config.schedules import choice_name
from deepspeed_compress.monitor import Event
from deepspeed_compress.policy.decider import Decider, StepPlan

RUN = 4
"""Number of steps of one kind in a row. The first two are not measured: messages of the other kind may still arrive,
and our reductions learn the order of buckets again. The first four of each kind allocate and compile, too."""
_SETTLING = 2
_LIMIT = 3
"""A comparison ends after this many times the required pairs, even if batches never keep their shapes."""
_SURE = 0.75
"""Share of the pairs in which compressed steps must be faster, and more. With equal speeds, 7 of 8 pairs are
in 1 of 28 comparisons."""
RECENT = 8
"""Number of steps whose median time is compared with that at the choice."""
CHANGED = 1.25
"""Ratio of times of steps, or its inverse, from which the kinds are compared again."""
_INTERVAL = 100
"""Number of steps from a choice to the first check of the times; twice as many after each comparison."""

Figures = Sequence[float]
"""Figures of a rank after a run of steps: the negative milliseconds of both steps of a pair, the step of the run before
first, or infinity if unknown; then 1 if batches changed their shapes, and 1 if it cannot change the kind of its steps.
All ranks take the largest of each, so a pair has the times of the rank that began its steps last: the others have
waited for that one."""


class Pair(NamedTuple):
    """Milliseconds of an uncompressed step and of a compressed one."""

    uncompressed_ms: float
    compressed_ms: float


class AutoChoice(Decider):
    """Comparison at the start of a run, and a new one when the times of steps have changed.

    Skipped steps are not passed to it. What ranks do not share (times and shapes of single steps) is not saved, so a
    pair that a resumed run has not seen from its beginning does not count.
    """

    def __init__(self, config: CompressConfig, record: Callable[[Event], None]) -> None:
        assert config.auto is not None
        self._config, self._record = config.auto, record
        self._compressed, self._name = brief(config.gradients), choice_name(config.gradients)
        self._compared = config.model_dump(mode="json", include={"gradients", "weights"})
        """Settings that are compared with uncompressed steps, as plain data for JSON."""
        self._interval = _INTERVAL
        self.restart()

    def restart(self) -> None:
        """Begin a new comparison with the next step."""
        self._steps = 0
        """Steps since the comparison began; after the choice, since that or the last check."""
        self._pairs: list[Pair] = []
        self._alike = 0
        """Number of the last pairs between which batches kept their shapes."""
        self._compresses: bool | None = None
        self._chosen_ms: float | None = None
        """Milliseconds of a step of the chosen kind at the choice; None if times are no longer looked at."""
        self._forget()

    def _forget(self) -> None:
        """Forget what this rank alone has seen."""
        self._times: list[float] = []
        """Milliseconds of the last steps, NaN for those that were not timed."""
        self._shapes: Any = None
        self._reshaped = False

    def plan(self, step: int, plan: StepPlan) -> StepPlan:
        return replace(plan, settings=NoneGradients(), alone=True) if self.alone else plan

    @property
    def length(self) -> int:
        """Return the smallest number of steps from the start of a comparison to the first step of the faster kind."""
        return RUN * (self._config.steps + 2) + 1

    @property
    def measures(self) -> bool:
        """Return True until the choice is made."""
        return self._compresses is None

    @property
    def alone(self) -> bool:
        """Return True if the next step is left to the engine, uncompressed."""
        return _is_alone(self._steps) if self._compresses is None else not self._compresses

    @property
    def times_next(self) -> bool:
        """Return True if the time of the next step is needed."""
        if self.measures:
            return self._steps % RUN >= _SETTLING
        return self._chosen_ms is not None and self._steps >= self._interval - RECENT

    def see(self, step_ms: float, shapes: Any) -> bool:
        """Note an applied step; return True if all ranks must now `choose`.

        Args:
            step_ms: milliseconds of the step on this rank; NaN if it was not timed.
            shapes: the shapes of its batches, or anything else that is equal for comparable steps.
        """
        self._reshaped |= self._shapes not in (None, shapes)
        self._shapes = shapes
        self._times = [*self._times, step_ms][-RECENT:]
        self._steps += 1
        if self.measures:
            return self._steps % RUN == 0
        return self._chosen_ms is not None and self._steps >= self._interval

    def figures(self, can_switch: bool) -> Figures:
        """Return the figures of this rank. `can_switch` tells if it can change the kind of its steps."""
        if not self.measures:
            first = second = statistics.median(self._times)
        elif len(self._times) <= RUN:
            first = second = float("nan")
        else:
            first, second = self._times[-RUN - 1], self._times[_SETTLING - RUN]
        reshaped, self._reshaped = self._reshaped, False
        return (-first, -second, float(reshaped), float(not can_switch))

    def choose(self, step: int, figures: Figures) -> None:
        """Compare the last two runs of steps, or check the times after a choice.

        Args:
            step: the finished step.
            figures: the largest of all ranks.
        """
        first, second, reshaped, is_stuck = -figures[0], -figures[1], bool(figures[2]), bool(figures[3])
        if is_stuck:
            # Steps of the present kind remain, and nothing is measured any more.
            if self._compresses is None:
                self._compresses = not _is_alone(self._steps - 1)
            self._chosen_ms = None
            reason = "other code on some rank prevents a change, so the run continues as it is"
            self._record(Event(step, "auto", reason, {}, self._text, self._text))
        elif self.measures:
            self._compare(step, first, second, reshaped)
        else:
            self._check(step, first)

    def _compare(self, step: int, first: float, second: float, reshaped: bool) -> None:
        """Add a pair, if it is one, and choose if there are enough of them."""
        # The first run of uncompressed steps is a warm-up, and so is the beginning of the first compressed one.
        if 0 < min(first, second) < math.inf and self._steps > 2 * RUN:
            self._pairs.append(Pair(second, first) if _is_alone(self._steps - 1) else Pair(first, second))
            self._alike = 0 if reshaped else self._alike + 1
        enough = self._config.steps
        if self._alike >= enough or self._steps >= RUN * (_LIMIT * enough + 2):
            self._decide(step, self._pairs[-enough:] if self._alike >= enough else self._pairs)

    def _decide(self, step: int, pairs: Sequence[Pair]) -> None:
        faster = sum(pair.compressed_ms < pair.uncompressed_ms for pair in pairs)
        sure = bool(pairs) and faster > _SURE * len(pairs)
        ratios = [pair.compressed_ms / pair.uncompressed_ms for pair in pairs]
        self._compresses = sure and statistics.median(ratios) <= 1 - self._config.margin
        reason, self._chosen_ms = "no steps could be timed, so this run continues uncompressed", None
        evidence: dict[str, float] = {}
        if pairs:
            theirs, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
            self._chosen_ms = ours if self._compresses else theirs
            evidence = {"uncompressed_ms": theirs, "compressed_ms": ours, "pairs": len(pairs), "faster": faster}
            reason = (
                f'{NOW} (uncompressed), a step takes {theirs:.0f} ms; "{self._name}" takes {ours:.0f} ms, '
                f"{theirs / ours:.2g} {TIMES}, and was faster in {faster} of {len(pairs)} pairs, so "
                f"{'compression stays' if self._compresses else 'this run continues uncompressed'}"
            )
        self._steps, self._pairs, self._alike = 0, [], 0
        self._forget()
        self._record(Event(step, "auto", reason, evidence, self._compressed, self._text))

    def _check(self, step: int, now: float) -> None:
        """Begin a new comparison if steps take `now` milliseconds, and took another time at the choice."""
        assert self._chosen_ms is not None
        before, text, self._steps = self._chosen_ms, self._text, 0
        if not 0 < now < math.inf or 1 / CHANGED < now / before < CHANGED:
            return
        self._interval *= 2
        self.restart()
        reason = f"steps take {now:.0f} ms, and took {before:.0f} ms at the last comparison, so it is repeated"
        self._record(Event(step, "auto", reason, {"before_ms": before, "now_ms": now}, text, text))

    @property
    def _text(self) -> str:
        """Return the settings of gradients after the choice, in short form."""
        return self._compressed if self._compresses else "none"

    def saved(self) -> dict[str, Any]:
        """Return the state that later steps depend on. It is the same on all ranks."""
        state = {
            "of": self._compared,
            "compresses": self._compresses,
            "steps": self._steps,
            "pairs": list(self._pairs),
            "alike": self._alike,
            "chosen_ms": self._chosen_ms,
            "interval": self._interval,
        }
        return {"auto": state}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the saved state, unless other settings were compared."""
        state = saved.get("auto")
        if state is None or state["of"] != self._compared:
            return
        self.restart()
        self._compresses, self._steps, self._alike = state["compresses"], state["steps"], state["alike"]
        self._pairs = [Pair(*pair) for pair in state["pairs"]]
        self._chosen_ms, self._interval = state["chosen_ms"], state["interval"]


def _is_alone(step: int) -> bool:
    """Return True if step number `step` of a comparison is left to the engine, uncompressed."""
    return step // RUN % 2 == 0
