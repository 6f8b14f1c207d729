"""What the terminal shows during a search: a bar with the trial that runs, and a line for each that is over."""

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from deepspeed_compress.tools.tune.halving import Result, Rung, trials_left
from deepspeed_compress.tools.tune.search import Budget
from deepspeed_compress.tools.tune.space import Candidate

__all__ = ["Display"]


class Display:
    """A `Watcher` that counts optimizer steps, those of all rungs that are still to come among them."""

    def __init__(self, console: Console, candidates: int, rungs: Sequence[Rung], budget: Budget) -> None:
        self._console, self._rungs, self._budget = console, rungs, budget
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left:"))
        text = TextColumn("{task.fields[budget]}")
        self._progress = Progress(*columns, TimeRemainingColumn(), text, console=console, transient=True)
        self._task = self._progress.add_task("", total=_steps(candidates, rungs), budget="")
        self._before = 0
        """Steps of the trials that are over."""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, candidate: Candidate, rung: Rung) -> None:
        text = f"rung {rung.number}/{len(self._rungs)}  {candidate.name}"
        self._progress.update(self._task, description=escape(text), budget=self._time_left())

    def steps(self, done: int) -> None:
        self._progress.update(self._task, completed=self._before + done, budget=self._time_left())

    def end(self, result: Result, rung: Rung, again: bool) -> None:
        self._before += rung.steps
        self.steps(0)
        figures = f"{result.step_ms:9,.1f} ms a step, loss {result.loss:.4f}"
        text = figures if result.finished else f"{result.status}: {result.error}"
        known = ", from before" if again else ""
        line = f"rung {rung.number}, {rung.steps} steps  {result.name:<22}{text}{known}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def rung_over(self, rung: Rung, left: int) -> None:
        """`left` candidates go on, fewer than were counted on perhaps."""
        total = self._before + _steps(left, self._rungs[rung.number :]) if left else self._before
        self._progress.update(self._task, total=total)

    def _time_left(self) -> str:
        left = self._budget.left()
        return "" if math.isinf(left) else f"of {max(0, left) / 60:.0f} min"


def _steps(candidates: int, rungs: Sequence[Rung]) -> int:
    return sum(rung.steps * count for rung, count in trials_left(candidates, rungs))
