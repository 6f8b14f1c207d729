"""Runs as reports see them: one table of columns by optimizer step per run, whichever program wrote its files."""

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed_compress.errors import DataError
from deepspeed_compress.tools.outputs.terminal import printable
from deepspeed_compress.tools.run_directory import METRICS, RunDirectory, read_directory
from deepspeed_compress.tools.run_files import is_number, is_step, read_content

Columns = dict[str, dict[int, Any]]

_LOGGED = "compression_"
"""Prefix of this package's metrics in the logs of Trainer and of DeepSpeed's monitors."""
_CSV = "Train_Samples_"


def _columns(lines: Iterable[Mapping[str, Any]], names: Mapping[str, str] = MappingProxyType({})) -> Columns:
    """Return the values of `lines` by step, without those that are null, with columns renamed by `names`."""
    columns: Columns = {}
    for line in lines:
        for key, value in line.items():
            if value is not None and key not in ("step", "run"):
                columns.setdefault(names.get(key, key), {})[int(line["step"])] = value
    return columns


def _metrics(files: RunDirectory) -> Columns:
    columns = _columns(files.metrics, {"step_time_s": "step_ms"})
    columns["step_ms"] = {step: 1e3 * seconds for step, seconds in columns.get("step_ms", {}).items()}
    return columns


def _trainer_log(files: RunDirectory) -> Columns:
    return _columns(files.trainer_log, {"loss": "train_loss", "train_loss": "mean_train_loss"})


def _csv_monitor(files: RunDirectory) -> Columns:
    """Return the columns of DeepSpeed's CSV monitor, which writes one file per metric, indexed by samples seen."""
    tables = {path.stem.removeprefix(_CSV): _read_csv(path) for path in _csv_files(files)}
    gaps = [after - before for rows in tables.values() for before, after in pairwise([0, *sorted(rows)])]
    # The learning rate is logged at every step, so the smallest difference is one step.
    batch = min((gap for gap in gaps if gap > 0), default=1)
    by_step = {name: {samples // batch: value for samples, value in rows.items()} for name, rows in tables.items()}
    return by_step | _stripped(by_step)


def _csv_files(files: RunDirectory) -> set[Path]:
    """Return CSV files in the directory that the configuration names, in that of the run and up to two levels below."""
    settings = (files.ds_config or {}).get("csv_monitor")
    place = [settings.get(key) for key in ("output_path", "job_name")] if isinstance(settings, Mapping) else []
    named = Path(files.directory, *(part for part in place if isinstance(part, str)))
    found = [named.glob(f"{_CSV}*.csv"), *(files.directory.glob(f"{depth}{_CSV}*.csv") for depth in ("", "*/", "*/*/"))]
    return {path for some in found for path in some}


def _read_csv(path: Path) -> dict[int, float]:
    """Return values by samples seen.

    A restarted program writes the header again and continues from its checkpoint, so later rows replace earlier ones.

    Raises:
        DataError: A row does not hold an integer and a number.
    """
    points: list[tuple[int, float]] = []
    text = io.StringIO(read_content(path).decode("utf-8", "replace"), newline="")
    try:
        for row in csv.reader(text):
            if len(row) == 2 and row[0].isascii() and row[0].isdecimal():
                samples = int(row[0])
                if not is_step(samples):
                    raise ValueError("more samples than any run sees")
                while points and points[-1][0] >= samples:
                    points.pop()
                points.append((samples, float(row[1])))
    except (ValueError, OverflowError, csv.Error) as error:
        raise DataError(
            f"{path}:{len(points) + 2}: not a line of a CSV monitor ({printable(str(error))}); remove the file"
        ) from None
    return {samples: value for samples, value in points if is_number(value)}


def _stripped(columns: Columns) -> Columns:
    ours = {name: values for name, values in columns.items() if name.startswith(_LOGGED)}
    return {name.removeprefix(_LOGGED): values for name, values in ours.items()}


SOURCES: tuple[Callable[[RunDirectory], Columns], ...] = (
    _metrics,
    lambda files: _columns(files.statistics),
    lambda files: _columns(files.versions),
    _trainer_log,
    # Means over the steps between two logs, for runs that have no statistics per step.
    lambda files: _stripped(_trainer_log(files)),
    # Losses of single steps, which the guard recorded.
    lambda files: {
        "train_loss": {line["step"]: line["loss"] for line in files.statistics if line.get("loss") is not None}
    },
    _csv_monitor,
)
"""Sources in order of preference. Each column is taken as a whole from the first source that has it."""


@dataclass(frozen=True)
class Run:
    """Run with its columns and events.

    Attributes:
        name: Name to display.
        role: "run" or "baseline". This is also the name of its color.
        files: Files of the run.
        columns: Values by step, in ascending order. Columns are named as in `StepStatistics`.
        events: Events in order of their steps.
    """

    name: str
    role: str
    files: RunDirectory
    columns: Columns
    events: tuple[Mapping[str, Any], ...]

    def column(self, key: str) -> dict[int, Any]:
        """Return the values of a column by step, in ascending order; empty if no file of the run has them."""
        return self.columns.get(key, {})

    def until(self, last: int) -> "Run":
        """Return this run without the values of steps after `last`."""
        columns = {
            key: {step: one for step, one in column.items() if step <= last} for key, column in self.columns.items()
        }
        return replace(self, columns=columns)

    @property
    def first_step(self) -> int:
        return self._range[0]

    @property
    def last_step(self) -> int:
        return self._range[1]

    @cached_property
    def _range(self) -> tuple[int, int]:
        """First and last step of all values and events. There is at least one."""
        steps = {int(event["step"]) for event in self.events}
        steps.update(*self.columns.values())
        return min(steps), max(steps)

    @property
    def status(self) -> str:
        """Return whether the run has finished, as far as its files show."""
        trainer, steps = self.files.trainer, self.last_step
        done, planned = ((trainer or {}).get(key) for key in ("global_step", "max_steps"))
        if self.files.summary or (planned and done is not None and done >= planned):
            return f"finished, {steps:,} steps"
        if planned:
            return f"still running: step {steps:,} of {planned:,}"
        if (self.files.directory / METRICS).is_file():
            return f"still running: {steps:,} steps so far"
        return f"{steps:,} steps so far (its files do not tell whether it has ended)"


def load_runs(run_dir: Path, baseline: Path | None) -> list[Run]:
    """Return the baseline, if any, and then the run. Neither has to be finished.

    Raises:
        DataError: A directory does not hold a run.
    """
    if baseline is None:
        return [_load(run_dir, run_dir.resolve().name, "run")]
    former, name = _distinct_names(baseline.resolve(), run_dir.resolve())
    return [_load(baseline, former, "baseline"), _load(run_dir, name, "run")]


def _distinct_names(first: Path, second: Path) -> tuple[str, str]:
    """Return the shortest trailing parts of two paths that differ, such as `none/seed0` and `int4/seed0`."""
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
    columns = {key: dict(sorted(values.items())) for key, values in columns.items()}
    if not any(columns.values()):
        raise DataError(
            f"{directory}: holds no run (none of metrics.jsonl, compression.jsonl, rollout.jsonl, trainer_state.json, "
            "checkpoint-*, Train_Samples_*.csv with lines in it); give the output directory of a run, or the "
            "monitor.path of its section"
        )
    return Run(
        printable(name), role, files, columns, tuple(sorted(files.events or (), key=lambda event: int(event["step"])))
    )
