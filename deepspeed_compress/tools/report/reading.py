"""Runs as reports see them: one table of columns a run, its events, and how far it got."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import DataError
from deepspeed_compress.tools.report.sources import SOURCES, Columns
from deepspeed_compress.tools.run_directory import METRICS, RunDirectory, read_directory

__all__ = ["Run", "load_runs"]


@dataclass(frozen=True)
class Run:
    """`role`: "run" or "baseline", which is the name of its colour too. `columns`: values by step, named as in
    `StepStatistics`."""

    name: str
    role: str
    files: RunDirectory
    columns: Columns
    events: tuple[Mapping[str, Any], ...]

    def column(self, key: str) -> dict[int, Any]:
        """Values by step, in order of steps; empty when no file of the run has them."""
        return dict(sorted(self.columns.get(key, {}).items()))

    @property
    def first_step(self) -> int:
        return min(self._steps)

    @property
    def last_step(self) -> int:
        return max(self._steps)

    @property
    def _steps(self) -> set[int]:
        """At least one."""
        written = {step for values in self.columns.values() for step in values}
        return written | {int(event["step"]) for event in self.events}

    @property
    def status(self) -> str:
        """Whether the run has ended, as far as its files tell."""
        trainer, steps = self.files.trainer, self.last_step
        if self.files.summary or (trainer and trainer["global_step"] >= trainer["max_steps"]):
            return f"finished, {steps:,} steps"
        if trainer:
            return f"still going: step {steps:,} of {trainer['max_steps']:,}"
        if (self.files.directory / METRICS).is_file():
            return f"still going: {steps:,} steps so far"
        return f"{steps:,} steps so far (its files do not tell whether it has ended)"


def load_runs(run_dir: Path, baseline: Path | None) -> list[Run]:
    """The baseline, if any, then the run; finished or not. Raises DataError when a directory holds no run."""
    if baseline is None:
        return [_load(run_dir, run_dir.resolve().name, "run")]
    former, name = _distinct_names(baseline.resolve(), run_dir.resolve())
    return [_load(baseline, former, "baseline"), _load(run_dir, name, "run")]


def _distinct_names(first: Path, second: Path) -> tuple[str, str]:
    """The last parts of two paths, as many as tell them apart: none/seed0 and int4/seed0."""
    for count in range(1, min(len(first.parts), len(second.parts))):
        names = "/".join(first.parts[-count:]), "/".join(second.parts[-count:])
        if names[0] != names[1]:
            return names
    return str(first), str(second)


def _load(directory: Path, name: str, role: str) -> Run:
    files = read_directory(directory)
    columns: Columns = {}
    for source in SOURCES:
        columns = source(files) | {key: values for key, values in columns.items() if values}
    if not any(columns.values()):
        raise DataError(
            f"{directory}: holds no run (none of metrics.jsonl, compression.jsonl, trainer_state.json, checkpoint-*, "
            "Train_Samples_*.csv with lines in it); give the output directory of a run, or the monitor.path of its "
            "section"
        )
    return Run(name, role, files, columns, tuple(sorted(files.events or (), key=lambda event: int(event["step"]))))
