"""What a run has left in its directories, as far as it is there."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepspeed_compress.config import SECTION, CompressConfig, read_ds_config
from deepspeed_compress.errors import DataError
from deepspeed_compress.train.records import COMPRESSION, METRICS, SUMMARY, read_lines

__all__ = ["CONFIG", "EVENTS", "Line", "Run", "read_run"]

EVENTS, CONFIG, TRAINER = "events.jsonl", "ds_config.json", "trainer_state.json"

Line = Mapping[str, Any]
Points = tuple[tuple[int, float], ...]
"""Optimizer steps and values, NaN where a loss was not finite."""


@dataclass(frozen=True)
class Run:
    """A run, finished or not. `steps`: compression.jsonl by step; `config` is None where the run did not leave it.

    `losses`: training losses, from the file that has most; `held_out`: evaluation losses.
    """

    directory: Path
    steps: tuple[Line, ...]
    events: tuple[Line, ...] | None = None
    """None where the run is of a version that wrote none."""
    losses: Points = ()
    held_out: Points = ()
    step_times: tuple[float, ...] = ()
    """Milliseconds, from metrics.jsonl."""
    summary: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    section: CompressConfig | None = None
    """Of `config`; None where that has none, or none that this version accepts."""


def read_run(directory: Path, config: Path | None = None) -> Run:
    """Raises DataError when `directory` holds no statistics, ConfigError when `config` cannot be read."""
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; give the output directory of a run, or its monitor.path")
    summary = _object(directory / SUMMARY)
    ds_config = _config(directory, config, summary)
    monitor = _monitor(directory, summary, ds_config)
    ds_config = ds_config or _object(monitor / CONFIG)
    steps = _in_order(_whole(monitor / COMPRESSION))
    if not steps:
        raise DataError(
            f"{monitor / COMPRESSION}: no statistics; set monitor.path of the section, or give the directory that "
            f"holds {COMPRESSION}"
        )
    metrics, trainer = _whole(directory / METRICS), _trainer_log(directory)
    return Run(
        directory,
        steps,
        _events(monitor / EVENTS, steps),
        max(_points(metrics, "train_loss"), _points(steps, "loss"), _points(trainer, "loss"), key=len),
        max(_points(metrics, "eval_loss"), _points(trainer, "eval_loss"), key=len),
        tuple(1e3 * line["step_time_s"] for line in metrics if "step_time_s" in line),
        summary,
        ds_config,
        _section(ds_config),
    )


def _config(directory: Path, given: Path | None, summary: Line | None) -> Line | None:
    if given is not None:
        return read_ds_config(given)
    places = [directory, Path((summary or {}).get("monitor_path") or directory)]
    return next((found for place in places if (found := _object(place / CONFIG))), None)


def _monitor(directory: Path, summary: Line | None, config: Line | None) -> Path:
    """Where compression.jsonl is: here, or where the summary or the configuration says."""
    section = (config or {}).get(SECTION)
    monitor = section.get("monitor") if isinstance(section, Mapping) else None
    path = monitor.get("path") if isinstance(monitor, Mapping) else None
    places = [directory, *(Path(place) for place in ((summary or {}).get("monitor_path"), path) if place)]
    return next((place for place in places if (place / COMPRESSION).is_file()), directory)


def _section(config: Line | None) -> CompressConfig | None:
    try:
        return CompressConfig.model_validate((config or {})[SECTION])
    except (KeyError, ValidationError):
        return None


def _object(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when there is no file. Raises DataError for anything else."""
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({error}); restore the file, or remove it") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: {type(value).__name__} (allowed: an object); restore the file, or remove it")
    return value


def _whole(file: Path) -> list[Line]:
    """The lines of a .jsonl file, which must be objects with a step."""
    lines = read_lines(file)
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise DataError(f'{file}:{number}: no "step" (allowed: an object with one); remove the line')
    return list(lines)


def _in_order(lines: Sequence[Line]) -> tuple[Line, ...]:
    """A resumed run goes back to its checkpoint: later lines stand in for earlier ones of the same or later steps."""
    kept: list[Line] = []
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return tuple(kept)


def _events(file: Path, steps: Sequence[Line]) -> tuple[Line, ...] | None:
    """The file is made with the first event, so a run that tells its settings and has none had no event."""
    return tuple(_whole(file)) if file.is_file() or any("settings" in line for line in steps) else None


def _trainer_log(directory: Path) -> list[Line]:
    """The log of Hugging Face Trainer, from its newest checkpoint."""
    files = [*directory.glob(f"checkpoint-*/{TRAINER}"), *directory.glob(TRAINER)]
    states = [state for file in files if (state := _object(file))]
    newest = max(states, key=lambda state: int(state.get("global_step", 0)), default={})
    return [line for line in newest.get("log_history", []) if "step" in line]


def _points(lines: Sequence[Line], key: str) -> Points:
    """Values by step. Null is not known, but not finite where finite ones come before it."""
    found, seen = [], False
    for line in _in_order([line for line in lines if key in line]):
        value = line[key]
        seen = seen or value is not None
        if seen:
            found.append((int(line["step"]), math.nan if value is None else float(value)))
    return tuple(found)
