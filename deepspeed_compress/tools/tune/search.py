"""The search: rung after rung, until the rungs, the candidates or the time are used up."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deepspeed_compress.tools.tune.halving import Result, Round, Rung, reserve, survivors
from deepspeed_compress.tools.tune.space import BASELINE, Candidate

__all__ = ["Budget", "Outcome", "Runner", "Watcher", "search"]

AS_LONG, STARTUP = 3.0, 60.0
"""A trial may take so many times the seconds of the baseline's, and these besides; a step that slow is no gain."""


class Runner(Protocol):
    """Where results come from: `Trials`, or something that computes them in tests."""

    def find(self, candidate: Candidate, rung: Rung) -> Result | None: ...

    def run(self, candidate: Candidate, rung: Rung, seconds: float, progress: Callable[[int], None]) -> Result: ...


class Watcher(Protocol):
    """Is told what happens."""

    def begin(self, candidate: Candidate, rung: Rung) -> None: ...

    def steps(self, done: int) -> None: ...

    def end(self, result: Result, rung: Rung, again: bool) -> None: ...

    def rung_over(self, rung: Rung, left: int) -> None: ...


@dataclass(frozen=True)
class Budget:
    """Seconds that may still pass by `clock`; None is without end."""

    seconds: float | None
    clock: Callable[[], float] = time.monotonic
    begun: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "begun", self.clock())

    def left(self) -> float:
        return math.inf if self.seconds is None else self.seconds - (self.clock() - self.begun)


@dataclass(frozen=True)
class Outcome:
    """The rounds that were held, the last one perhaps in part. `stopped`: why before the end; `failure`: the trial of
    the baseline that failed."""

    rounds: tuple[Round, ...]
    stopped: str = ""
    failure: Result | None = None


def search(
    candidates: Sequence[Candidate],
    rungs: Sequence[Rung],
    runner: Runner,
    metric: str,
    budget: Budget,
    watcher: Watcher,
) -> Outcome:
    """Try all `candidates`, the baseline first, in the first of `rungs`, and in each further one those that survive.

    Where nobody survives, those come in that had no place before. The search ends when there is nobody left, when time
    is up (the trial that runs is ended), and when the baseline fails, without which nothing can be compared.
    """
    known = {candidate.name: candidate for candidate in candidates}
    names, rounds = list(known), list[Round]()
    for rung in rungs:
        before, results = tuple(rounds), dict[str, Result]()
        while names:
            for result in _trials(
                [known[name] for name in names], rung, runner, budget, watcher, results.get(BASELINE)
            ):
                results[result.name] = result
            rounds = [*before, Round(rung, results)] if results else rounds
            stopped = _stopped(results, names, rung)
            if stopped is not None:
                return Outcome(tuple(rounds), *stopped)
            names = [] if survivors(rounds[-1], metric) else reserve(before, results, metric)
        names = [BASELINE, *survivors(rounds[-1], metric)]
        watcher.rung_over(rung, len(names) - 1)
        if len(names) == 1:
            break
    return Outcome(tuple(rounds))


def _trials(
    candidates: Sequence[Candidate],
    rung: Rung,
    runner: Runner,
    budget: Budget,
    watcher: Watcher,
    baseline: Result | None,
) -> Iterator[Result]:
    """Results in order, until the baseline fails or time is up. `baseline`: of this rung, if it has been tried."""
    for candidate in candidates:
        found = runner.find(candidate, rung)
        if found is None and budget.left() <= 0:
            return
        watcher.begin(candidate, rung)
        seconds = min(_longest(baseline), budget.left())
        result = found or _timely(runner.run(candidate, rung, seconds, watcher.steps), budget)
        watcher.end(result, rung, again=found is not None)
        yield result
        baseline = result if candidate.name == BASELINE else baseline
        if result.status == "stopped" or (baseline is not None and not baseline.finished):
            return


def _longest(baseline: Result | None) -> float:
    return math.inf if baseline is None else AS_LONG * baseline.seconds + STARTUP


def _timely(result: Result, budget: Budget) -> Result:
    """A trial that was ended before the budget is used up was too slow by itself."""
    if result.status == "stopped" and budget.left() > 0:
        return Result(
            result.name,
            "failed",
            seconds=result.seconds,
            error=f"took more than {AS_LONG:g} times as long as uncompressed training",
            tail=result.tail,
        )
    return result


def _stopped(results: Mapping[str, Result], names: Sequence[str], rung: Rung) -> tuple[str, Result | None] | None:
    """Why the search ends with this rung; None when it has tried all it was to try."""
    baseline = results.get(BASELINE)
    if baseline is not None and baseline.status == "failed":
        return f"uncompressed training failed in rung {rung.number}", baseline
    if not results.keys() >= set(names) or any(result.status == "stopped" for result in results.values()):
        return f"the time budget was used up in rung {rung.number}", None
    return None
