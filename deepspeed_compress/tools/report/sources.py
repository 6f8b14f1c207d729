"""The files that runs leave behind, each as columns: values by optimizer step, by one name whoever wrote them."""

import csv
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed_compress.tools.run_directory import RunDirectory, in_order

__all__ = ["SOURCES", "Columns"]

Columns = dict[str, dict[int, Any]]

_LOGGED = "compression_"
"""In front of our names in the logs of Trainer and of DeepSpeed's monitors."""
_CSV = "Train_Samples_"


def _columns(lines: Iterable[Mapping[str, Any]], names: Mapping[str, str] = MappingProxyType({})) -> Columns:
    """Values of `lines` by step, renamed by `names`."""
    columns: Columns = {}
    for line in lines:
        for key, value in line.items():
            finite = value is not None and not (isinstance(value, float) and not math.isfinite(value))
            if finite and key not in ("step", "run"):
                columns.setdefault(names.get(key, key), {})[int(line["step"])] = value
    return columns


def _metrics(files: RunDirectory) -> Columns:
    columns = _columns(files.metrics, {"step_time_s": "step_ms"})
    columns["step_ms"] = {step: 1e3 * seconds for step, seconds in columns.get("step_ms", {}).items()}
    return columns


def _trainer_log(files: RunDirectory) -> Columns:
    return _columns(files.trainer_log, {"loss": "train_loss", "train_loss": "mean_train_loss"})


def _statistics(files: RunDirectory) -> Columns:
    columns = _columns(files.statistics)
    # Older lines name the method alone.
    columns.setdefault("settings", columns.get("method", {}))
    return columns


def _guarded_loss(files: RunDirectory) -> Columns:
    """Of single steps, where nobody has logged anything better."""
    return {"train_loss": _statistics(files).get("loss", {})}


def _trainer_statistics(files: RunDirectory) -> Columns:
    """Means over the steps between two logs, for runs without statistics of every step."""
    return _stripped(_trainer_log(files))


def _csv_monitor(files: RunDirectory) -> Columns:
    """DeepSpeed's CSV monitor: a file a name, by samples seen."""
    tables = {path.stem.removeprefix(_CSV): _read_csv(path) for path in _csv_files(files)}
    gaps = [after - before for rows in tables.values() for before, after in pairwise([0, *sorted(rows)])]
    # The learning rate is there for every step, so the smallest distance is one step.
    batch = min((gap for gap in gaps if gap > 0), default=1)
    by_step = {name: {samples // batch: value for samples, value in rows.items()} for name, rows in tables.items()}
    return by_step | _stripped(by_step)


def _csv_files(files: RunDirectory) -> set[Path]:
    """In the directory that the configuration names, and up to two below that of the run."""
    settings = (files.ds_config or {}).get("csv_monitor", {})
    named = Path(settings.get("output_path") or files.directory) / settings.get("job_name", "")
    found = [named.glob(f"{_CSV}*.csv"), *(files.directory.glob(f"{depth}{_CSV}*.csv") for depth in ("", "*/", "*/*/"))]
    return {path for some in found for path in some}


def _read_csv(path: Path) -> dict[int, float]:
    """Values by samples. Every start of the program writes the heading again, and goes on from where it stood."""
    with path.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.reader(stream) if len(row) == 2 and row[0].isdecimal()]
    standing = in_order({"step": int(samples), "value": float(value)} for samples, value in rows)
    return {line["step"]: line["value"] for line in standing if math.isfinite(line["value"])}


def _stripped(columns: Columns) -> Columns:
    ours = {name: values for name, values in columns.items() if name.startswith(_LOGGED)}
    return {name.removeprefix(_LOGGED): values for name, values in ours.items()}


SOURCES: tuple[Callable[[RunDirectory], Columns], ...] = (
    _metrics,
    _statistics,
    _trainer_log,
    _trainer_statistics,
    _guarded_loss,
    _csv_monitor,
)
"""In order of preference: a column comes whole from the first that has it."""
