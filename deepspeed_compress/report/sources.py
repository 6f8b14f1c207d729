"""The files that runs leave behind, each as columns: values by optimizer step, by one name whoever wrote them."""

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed_compress.errors import DataError
from deepspeed_compress.train.records import COMPRESSION, METRICS, SUMMARY, read_lines, read_summary

__all__ = ["SOURCES", "Columns", "Files", "find_files"]

Columns = dict[str, dict[int, Any]]

DS_CONFIG, EVENTS, TRAINER = "ds_config.json", "events.jsonl", "trainer_state.json"
_LOGGED = "compression_"
"""In front of our names in the logs of Trainer and of DeepSpeed's monitors."""
_CSV = "Train_Samples_"


@dataclass(frozen=True)
class Files:
    """What was found of a run. `monitor`: the directory of the statistics, which may be another one."""

    directory: Path
    monitor: Path
    summary: Mapping[str, Any]
    ds_config: Mapping[str, Any]
    trainer: Mapping[str, Any]

    @property
    def events(self) -> list[dict[str, Any]]:
        """Lines of events.jsonl, in order of steps."""
        return sorted(read_lines(self.monitor / EVENTS), key=lambda event: int(event["step"]))


def find_files(directory: Path) -> Files:
    """Raises DataError for a file that is no JSON."""
    summary = read_summary(directory) if (directory / SUMMARY).is_file() else {}
    ds_config = _read(directory / DS_CONFIG)
    monitor = ds_config.get("deepspeed_compress", {}).get("monitor", {}).get("path")
    places = [Path(place) for place in (summary.get("monitor_path"), monitor, directory) if place]
    found = next((place for place in places if (place / COMPRESSION).is_file()), directory)
    return Files(directory, found, summary, ds_config or _read(found / DS_CONFIG), _trainer_state(directory))


def _trainer_state(directory: Path) -> dict[str, Any]:
    """Of the end of the run, or of the newest checkpoint while it goes on."""
    checkpoints = [path for path in directory.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    newest = sorted(checkpoints, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    return next((state for place in (directory, *newest) if (state := _read(place / TRAINER))), {})


def _read(file: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({error}); restore the file, or remove it") from None
    return value


def _columns(lines: Iterable[Mapping[str, Any]], names: Mapping[str, str] = MappingProxyType({})) -> Columns:
    """Values of `lines` by step, renamed by `names`. A resumed run writes steps again: the last line counts."""
    columns: Columns = {}
    for line in lines:
        for key, value in line.items():
            if key != "step" and value is not None and not (isinstance(value, float) and not math.isfinite(value)):
                columns.setdefault(names.get(key, key), {})[int(line["step"])] = value
    return columns


def _metrics(files: Files) -> Columns:
    columns = _columns(read_lines(files.directory / METRICS), {"step_time_s": "step_ms"})
    columns["step_ms"] = {step: 1e3 * seconds for step, seconds in columns.get("step_ms", {}).items()}
    return columns


def _trainer_log(files: Files) -> Columns:
    return _columns(files.trainer.get("log_history", ()), {"loss": "train_loss", "train_loss": "mean_train_loss"})


def _statistics(files: Files) -> Columns:
    columns = _columns(read_lines(files.monitor / COMPRESSION))
    # Older lines name the method alone.
    columns.setdefault("settings", columns.get("method", {}))
    return columns


def _guarded_loss(files: Files) -> Columns:
    """Of single steps, where nobody has logged anything better."""
    return {"train_loss": _statistics(files).get("loss", {})}


def _trainer_statistics(files: Files) -> Columns:
    """Means over the steps between two logs, for runs without statistics of every step."""
    return _stripped(_trainer_log(files))


def _csv_monitor(files: Files) -> Columns:
    """DeepSpeed's CSV monitor: a file a name, by samples seen."""
    tables = {path.stem.removeprefix(_CSV): _read_csv(path) for path in _csv_files(files)}
    gaps = [after - before for rows in tables.values() for before, after in pairwise([0, *sorted(rows)])]
    # The learning rate is there for every step, so the smallest distance is one step.
    batch = min((gap for gap in gaps if gap > 0), default=1)
    by_step = {name: {samples // batch: value for samples, value in rows.items()} for name, rows in tables.items()}
    return by_step | _stripped(by_step)


def _csv_files(files: Files) -> set[Path]:
    """In the directory that the configuration names, and up to two below that of the run."""
    settings = files.ds_config.get("csv_monitor", {})
    named = Path(settings.get("output_path") or files.directory) / settings.get("job_name", "")
    found = [named.glob(f"{_CSV}*.csv"), *(files.directory.glob(f"{depth}{_CSV}*.csv") for depth in ("", "*/", "*/*/"))]
    return {path for some in found for path in some}


def _read_csv(path: Path) -> dict[int, float]:
    """Values by samples. Every start of the program writes the heading again."""
    with path.open(encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.reader(stream) if len(row) == 2 and row[0].isdecimal()]
    return {int(samples): float(value) for samples, value in rows if math.isfinite(float(value))}


def _stripped(columns: Columns) -> Columns:
    ours = {name: values for name, values in columns.items() if name.startswith(_LOGGED)}
    return {name.removeprefix(_LOGGED): values for name, values in ours.items()}


SOURCES: tuple[Callable[[Files], Columns], ...] = (
    _metrics,
    _statistics,
    _trainer_log,
    _trainer_statistics,
    _guarded_loss,
    _csv_monitor,
)
"""In order of preference: a column comes whole from the first that has it."""
