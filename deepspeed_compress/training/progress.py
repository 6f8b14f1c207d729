"""Progress on rank 0: a bar on a terminal, plain lines elsewhere, nothing on other ranks."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Display(Protocol):
    """Where a long piece of work shows how far it is."""

    def show(self, done: int, total: int, text: str) -> None:
        """Work stands at `done` of `total`."""

    def line(self, text: str) -> None:
        """Print a line that stays."""


class Silent:
    """For ranks other than the first."""

    def show(self, done: int, total: int, text: str) -> None:
        pass

    def line(self, text: str) -> None:
        pass


class Lines:
    """For a file or a pipe: one plain line at a time, flushed."""

    def show(self, done: int, total: int, text: str) -> None:
        print(f"{done}/{total}  {text}", flush=True)

    def line(self, text: str) -> None:
        print(text, flush=True)


class Bar:
    """For a terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self.progress, self.task = progress, task

    def show(self, done: int, total: int, text: str) -> None:
        self.progress.update(self.task, completed=done, total=total, text=text)

    def line(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)


@contextmanager
def display(label: str, visible: bool) -> Iterator[Display]:
    """A display named `label`; a silent one unless `visible`."""
    console = Console()
    if not visible:
        yield Silent()
    elif not console.is_terminal:
        yield Lines()
    else:
        columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[text]}"), console=console) as progress:
            yield Bar(progress, progress.add_task(label, total=None, text=""))


class Throttled:
    """Shows work in bytes, as MB, every few seconds: short work stays silent."""

    def __init__(self, target: Display, seconds: float = 3.0) -> None:
        self.target, self.seconds, self.due = target, seconds, time.monotonic() + seconds

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self.due:
            self.due = now + self.seconds
            self.target.show(done // 1_000_000, total // 1_000_000, f"MB, {what}")
