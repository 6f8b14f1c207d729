"""Choice between compressed steps and uncompressed ones of the engine alone, by their measured times.

Both kinds take turns, a few steps at a time: U U U U C C C C U U U U C C C C ... Each change of kind gives a pair: the
last step before it, and the first later one that feels nothing of it any more. Every second pair begins with the other
kind (ABBA), so what makes all steps slower or faster meanwhile (a slow start, a warmer processor) cancels out.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config.models import Auto

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


@dataclass(frozen=True)
class Pair:
    """Milliseconds of an uncompressed step and of a compressed one."""

    uncompressed_ms: float
    compressed_ms: float


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Attributes:
        compresses: True if later steps are compressed.
        pairs: the pairs that decided.
    """

    compresses: bool
    pairs: Sequence[Pair]

    @property
    def faster(self) -> int:
        """Return the number of pairs in which the compressed step was faster."""
        return sum(pair.compressed_ms < pair.uncompressed_ms for pair in self.pairs)

    @property
    def evidence(self) -> dict[str, float]:
        """Return the median milliseconds of each kind, the number of pairs, and in how many compression was faster."""
        if not self.pairs:
            return {}
        medians = {
            "uncompressed_ms": statistics.median(pair.uncompressed_ms for pair in self.pairs),
            "compressed_ms": statistics.median(pair.compressed_ms for pair in self.pairs),
        }
        return {**medians, "pairs": len(self.pairs), "faster": self.faster}

    @property
    def reason(self) -> str:
        if not self.pairs:
            return "no steps could be timed, so this run continues uncompressed"
        ours, theirs = self.evidence["compressed_ms"], self.evidence["uncompressed_ms"]
        what = f"compressed steps take {ours:.0f} ms, uncompressed ones {theirs:.0f} ms"
        sure = f"compressed ones were faster in {self.faster} of {len(self.pairs)} pairs"
        return f"{what}; {sure}, so {'compression stays' if self.compresses else 'this run continues uncompressed'}"


class AutoChoice:
    """Comparison at the start of a run, and a new one when the times of steps have changed.

    Skipped steps are not passed to it. What ranks do not share (times and shapes of single steps) is not saved, so a
    pair that a resumed run has not seen from its beginning does not count.
    """

    def __init__(self, config: Auto) -> None:
        self._config = config
        self._interval = _INTERVAL
        self._begin()

    def _begin(self) -> None:
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

    @property
    def length(self) -> int:
        """Return the smallest number of steps from the start of a comparison to the first step of the faster kind."""
        return RUN * (self._config.steps + 2) + 1

    def restart(self) -> None:
        """Begin a new comparison with the next step."""
        self._begin()

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
        """Note an applied step; return True if all ranks must now `close` a run of steps.

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

    def close(self, figures: Figures) -> Verdict | None:
        """End a run of steps, given the largest figures of all ranks; return the choice if it is made."""
        assert self.measures
        first, second, reshaped = -figures[0], -figures[1], bool(figures[2])
        # The first run of uncompressed steps is a warm-up, and so is the beginning of the first compressed one.
        if 0 < min(first, second) < float("inf") and self._steps > 2 * RUN:
            self._pairs.append(Pair(second, first) if _is_alone(self._steps - 1) else Pair(first, second))
            self._alike = 0 if reshaped else self._alike + 1
        enough = self._config.steps
        if self._alike < enough and self._steps < RUN * (_LIMIT * enough + 2):
            return None
        return self._choose(self._pairs[-enough:] if self._alike >= enough else self._pairs)

    def _choose(self, pairs: list[Pair]) -> Verdict:
        ratios = [pair.compressed_ms / pair.uncompressed_ms for pair in pairs]
        faster = sum(ratio < 1 for ratio in ratios)
        sure = bool(pairs) and faster > _SURE * len(pairs)
        self._compresses = sure and statistics.median(ratios) <= 1 - self._config.margin
        times = [pair.compressed_ms if self._compresses else pair.uncompressed_ms for pair in pairs]
        self._chosen_ms = statistics.median(times) if times else None
        self._steps, self._pairs, self._alike = 0, [], 0
        self._forget()
        return Verdict(self._compresses, pairs)

    def check(self, figures: Figures) -> tuple[float, float] | None:
        """Compare the times of the last steps, the largest figures of all ranks, with those at the choice.

        Returns:
            If they have changed, and a new comparison begins: the milliseconds of a step then, and now.
        """
        assert self._chosen_ms is not None
        before, now = self._chosen_ms, -figures[0]
        self._steps = 0
        if not 0 < now < float("inf") or 1 / CHANGED < now / before < CHANGED:
            return None
        self._interval *= 2
        self._begin()
        return before, now

    def stop(self) -> None:
        """End the comparison without measuring further. Steps of the present kind remain."""
        if self.measures:
            self._compresses = not _is_alone(self._steps - 1)
        self._chosen_ms = None

    def saved(self) -> dict[str, Any]:
        """Return the state that later steps depend on, for JSON. It is the same on all ranks."""
        return {
            "compresses": self._compresses,
            "steps": self._steps,
            "pairs": [[pair.uncompressed_ms, pair.compressed_ms] for pair in self._pairs],
            "alike": self._alike,
            "chosen_ms": self._chosen_ms,
            "interval": self._interval,
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state that `saved` returned."""
        self._begin()
        self._compresses = saved["compresses"]
        # Older state files have only the choice.
        self._steps, self._alike = saved.get("steps", 0), saved.get("alike", 0)
        self._pairs = [Pair(*pair) for pair in saved.get("pairs", ())]
        self._chosen_ms, self._interval = saved.get("chosen_ms"), saved.get("interval", _INTERVAL)


def _is_alone(step: int) -> bool:
    """Return True if step number `step` of a comparison is left to the engine, uncompressed."""
    return step // RUN % 2 == 0
