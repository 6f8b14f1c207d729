"""What a run has left in its directories, as far as it is there."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepspeed_compress.config import SECTION, CompressConfig, read_ds_config
from deepspeed_compress.errors import DataError
from deepspeed_compress.tools.run_directory import STATISTICS, Line, in_order, read_directory

__all__ = ["Line", "Run", "read_run"]

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
    """Those of the ranks that the figures are of, the first island's; None where the run is of a version that wrote
    none."""
    losses: Points = ()
    held_out: Points = ()
    step_times: tuple[float, ...] = ()
    """Milliseconds, from metrics.jsonl."""
    summary: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    measured: int = 0
    """Number of measured steps, of which `steps` may be a sample."""
    section: CompressConfig | None = None
    """Of `config`; None where that has none, or none that this version accepts."""


def read_run(directory: Path, config: Path | None = None) -> Run:
    """Raises DataError when `directory` holds no statistics, ConfigError when `config` cannot be read."""
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; give the output directory of a run, or its monitor.path")
    found = read_directory(directory, None if config is None else read_ds_config(config))
    if not found.statistics:
        raise DataError(
            f"{found.monitor / STATISTICS}: no statistics; set monitor.path of the section, or give the directory "
            f"that holds {STATISTICS}"
        )
    logged = (found.metrics, "train_loss"), (found.statistics, "loss"), (found.trainer_log, "loss")
    return Run(
        directory,
        found.statistics,
        _of_first_island(found.events),
        max((_points(lines, key) for lines, key in logged), key=len),
        max(_points(found.metrics, "eval_loss"), _points(found.trainer_log, "eval_loss"), key=len),
        tuple(1e3 * line["step_time_s"] for line in found.metrics if "step_time_s" in line),
        found.summary,
        found.ds_config,
        found.measured,
        _section(found.ds_config),
    )


def _of_first_island(events: Sequence[Line] | None) -> tuple[Line, ...] | None:
    return None if events is None else tuple(event for event in events if not event.get("island"))


def _section(config: Line | None) -> CompressConfig | None:
    try:
        return CompressConfig.model_validate((config or {})[SECTION])
    except (KeyError, ValidationError):
        return None


def _points(lines: Sequence[Line], key: str) -> Points:
    """Values by step. Null is not known, but not finite where finite ones come before it."""
    found, seen = [], False
    for line in in_order(line for line in lines if key in line):
        value = line[key]
        seen = seen or value is not None
        if seen:
            found.append((int(line["step"]), math.nan if value is None else float(value)))
    return tuple(found)
