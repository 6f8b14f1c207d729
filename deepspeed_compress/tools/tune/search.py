"""Search rung after rung until rungs, candidates or time are used up, and its display on the terminal."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from deepspeed_compress.tools.tune.halving import Result, Round, Rung, promoted, reserve
from deepspeed_compress.tools.tune.space import BASELINE, Candidate
from deepspeed_compress.tools.tune.trials import LOG, Trials

AS_LONG, STARTUP = 3.0, 60.0
"""Longest trial relative to the baseline's, and seconds added to it. A candidate that slow is no gain."""


class Budget:
    """Time left for the search: `seconds` from now on, or no limit if None. A single trial may take `trial` seconds."""

    def __init__(
        self, seconds: float | None, clock: Callable[[], float] = time.monotonic, trial: float = math.inf
    ) -> None:
        self.clock, self.trial = clock, trial
        self._end = math.inf if seconds is None else clock() + seconds

    def left(self) -> float:
        return self._end - self.clock()


@dataclass(frozen=True)
class Outcome:
    """Outcome of a search.

    Attributes:
        rounds: Rounds that were held. The last one may be incomplete.
        stopped: Reason for an early end, or "".
        failure: Trial of the baseline, if it failed.
    """

    rounds: tuple[Round, ...]
    stopped: str = ""
    failure: Result | None = None


SILENT = 30.0
"""Seconds without output after which a line reports the progress of the running trial."""


class Display:
    """Progress of the search on the terminal.

    `look` searches for causes of a stalled trial, such as abandoned locks, and passes a text for each to its argument.
    It is called until the trial has made its first measured step.
    """

    def __init__(
        self, console: Console, budget: Budget, look: Callable[[Callable[[str], None]], None] = lambda tell: None
    ) -> None:
        self._console, self._budget, self._look = console, budget, look
        self._running = ("", 0)
        """Name and number of steps of the running trial."""
        self._begun = self._told = budget.clock()

    def begin(self, candidate: Candidate, rung: Rung, log: Path) -> None:
        self._running, self._begun = (candidate.name, rung.steps), self._budget.clock()
        left = "" if math.isinf(self._budget.left()) else f", {_duration(max(0, self._budget.left()))} left"
        self._line(f"rung {rung.number}: {candidate.name}, {rung.steps} steps{left}, log {log}")

    def steps(self, done: int) -> None:
        if self._budget.clock() - self._told > SILENT:
            name, steps = self._running
            self._line(f"{name}: {done} of {steps} steps after {_duration(self._budget.clock() - self._begun)}")
            if not done:
                self._look(self._line)

    def end(self, result: Result, rung: Rung, again: bool) -> None:
        figures = f"{result.step_ms:9,.1f} ms a step, loss {result.loss:.4f}"
        text = figures if result.finished else f"{result.status}: {result.error}"
        known = ", from before" if again else ""
        self._line(f"rung {rung.number}, {rung.steps} steps  {result.name:<22}{text}{known}")

    def _line(self, text: str) -> None:
        self._told = self._budget.clock()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def search(
    candidates: Sequence[Candidate],
    rungs: Sequence[Rung],
    trials: Trials,
    metric: str,
    budget: Budget,
    display: Display,
) -> Outcome:
    """Try all `candidates`, baseline first, in the first of `rungs`, and the promoted ones in each further rung.

    If no candidate is promoted, ones that were dropped earlier for lack of places return. The search ends if no
    candidate remains, if time is up (the running trial is then ended), or if the baseline fails, because nothing can be
    compared without it.
    """
    known = {candidate.name: candidate for candidate in candidates}
    names, rounds = list(known), list[Round]()
    for rung in rungs:
        before, results = tuple(rounds), dict[str, Result]()
        while names:
            for result in _trials(
                [known[name] for name in names], rung, trials, budget, display, results.get(BASELINE)
            ):
                results[result.name] = result
            rounds = [*before, Round(rung, results)] if results else rounds
            stopped = _stopped(results, names, rung)
            if stopped is not None:
                return Outcome(tuple(rounds), *stopped)
            names = [] if promoted(rounds[-1], metric) else reserve(before, results, metric)
        names = [BASELINE, *promoted(rounds[-1], metric)]
        if len(names) == 1:
            break
    return Outcome(tuple(rounds))


def _trials(
    candidates: Sequence[Candidate],
    rung: Rung,
    trials: Trials,
    budget: Budget,
    display: Display,
    baseline: Result | None,
) -> Iterator[Result]:
    """Yield results in order until the baseline fails or time is up.

    `baseline` is the result of the baseline in this rung, if it has been tried already.
    """
    for candidate in candidates:
        found = trials.find(candidate, rung)
        if found is None and budget.left() <= 0:
            return
        display.begin(candidate, rung, trials.directory(candidate, rung) / LOG)
        longest = math.inf if baseline is None else AS_LONG * baseline.seconds + STARTUP
        seconds = min(longest, budget.trial, budget.left())
        result = found or _timely(trials.run(candidate, rung, seconds, display.steps), budget)
        display.end(result, rung, again=found is not None)
        yield result
        baseline = result if candidate.name == BASELINE else baseline
        if result.status == "stopped" or (baseline is not None and not baseline.finished):
            return


def _timely(result: Result, budget: Budget) -> Result:
    """Return the result as failed if the trial was stopped for its own slowness, with budget left."""
    limit = f"took more than {AS_LONG:g} times as long as uncompressed training"
    if result.seconds >= budget.trial:
        limit = f"took longer than --trial-timeout, {_duration(budget.trial)}"
    ran_out = result.status == "stopped" and budget.left() > 0
    return replace(result, status="failed", error=limit) if ran_out else result


def _stopped(results: Mapping[str, Result], names: Sequence[str], rung: Rung) -> tuple[str, Result | None] | None:
    """Return why the search ends with this rung and the failed baseline, if any; None if all trials were made."""
    baseline = results.get(BASELINE)
    if baseline is not None and baseline.status == "failed":
        return f"uncompressed training failed in rung {rung.number}", baseline
    if not results.keys() >= set(names) or any(result.status == "stopped" for result in results.values()):
        return f"the time budget was used up in rung {rung.number}", None
    return None
