"""Search rung after rung until rungs, candidates or time are used up, and its display on the terminal."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deepspeed_compress.tools.tune.halving import Result, Round, Rung, promoted, reserve, trials_left
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
    """Progress of the search on the terminal, counted in optimizer steps including those of later rungs.

    `look` searches for causes of a stalled trial, such as abandoned locks, and passes a text for each to its argument.
    It is called until the trial has made its first measured step.
    """

    def __init__(
        self,
        console: Console,
        candidates: int,
        rungs: Sequence[Rung],
        budget: Budget,
        look: Callable[[Callable[[str], None]], None] = lambda tell: None,
    ) -> None:
        self._console, self._rungs, self._budget, self._look = console, rungs, budget, look
        self._number, self._count = 0, sum(count for _, count in trials_left(candidates, rungs))
        """Number of the running trial, and the maximum number of trials."""
        self._running = ("", 0)
        """Name and number of steps of the running trial."""
        self._begun = self._told = budget.clock()
        self._pace: float | None = None
        """Seconds per step, including startup, in the last trial that finished."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
        text = TextColumn("{task.fields[budget]}")
        self._progress = Progress(*columns, TimeRemainingColumn(), text, console=console, transient=True)
        self._task = self._progress.add_task("", total=_steps(candidates, rungs), budget="")
        self._before = 0
        """Steps of the trials that have ended."""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, candidate: Candidate, rung: Rung, log: Path) -> None:
        self._number += 1
        self._running, self._begun = (candidate.name, rung.steps), self._budget.clock()
        estimate = "" if self._pace is None else f", about {_duration(self._pace * rung.steps)}"
        self._line(f"trial {self._number} of {self._count}: {candidate.name}, {rung.steps} steps{estimate}, log {log}")
        text = f"rung {rung.number}/{len(self._rungs)}  {candidate.name}"
        self._progress.update(self._task, description=escape(text), budget=self._time_left())

    def steps(self, done: int) -> None:
        if self._budget.clock() - self._told > SILENT:
            name, steps = self._running
            elapsed = _duration(self._budget.clock() - self._begun)
            self._line(f"trial {self._number} of {self._count}: {name}, {done} of {steps} steps after {elapsed}")
            if not done:
                self._look(self._line)
        self._progress.update(self._task, completed=self._before + done, budget=self._time_left())

    def end(self, result: Result, rung: Rung, again: bool) -> None:
        self._told = self._budget.clock()
        self._before += rung.steps
        if result.finished and not again:
            self._pace = result.seconds / rung.steps
        self.steps(0)
        figures = f"{result.step_ms:9,.1f} ms a step, loss {result.loss:.4f}"
        text = figures if result.finished else f"{result.status}: {result.error}"
        known = ", from before" if again else ""
        line = f"rung {rung.number}, {rung.steps} steps  {result.name:<22}{text}{known}"
        self._line(line)

    def _line(self, text: str) -> None:
        self._told = self._budget.clock()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def rung_over(self, rung: Rung, left: int) -> None:
        """Adjust the total after a rung. `left` candidates are promoted, perhaps fewer than expected."""
        self._count = self._number + sum(count for _, count in trials_left(left, self._rungs[rung.number :]) if left)
        total = self._before + _steps(left, self._rungs[rung.number :]) if left else self._before
        self._progress.update(self._task, total=total)

    def _time_left(self) -> str:
        left = self._budget.left()
        return "" if math.isinf(left) else f"of {max(0, left) / 60:.0f} min"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _steps(candidates: int, rungs: Sequence[Rung]) -> int:
    return sum(rung.steps * count for rung, count in trials_left(candidates, rungs))


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
        display.rung_over(rung, len(names) - 1)
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
