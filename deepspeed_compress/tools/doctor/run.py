"""Run to diagnose, read from the files that it has left in its directories."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepspeed_compress.config import CompressConfig, read_ds_config, with_preset
from deepspeed_compress.errors import DataError
from deepspeed_compress.monitor import STATISTICS
from deepspeed_compress.tools.run_directory import Line, RunDirectory, drop_replaced, read_directory

Points = tuple[tuple[int, float], ...]
"""Optimizer steps with their values. A value is NaN if the loss was not finite."""


@dataclass(frozen=True)
class Run:
    """Run to diagnose, finished or not.

    Attributes:
        directory: Directory of the run.
        steps: Lines of compression.jsonl in order of steps.
        losses: Training losses, from the file that holds the most.
        held_out: Evaluation losses, from the file that holds the most.
        summary: Summary of the run, or None if there is none.
        config: DeepSpeed configuration, or None if the run did not leave it.
    """

    directory: Path
    steps: tuple[Line, ...]
    events: tuple[Line, ...] | None = None
    """Events of the first island, whose ranks the figures describe. None if the run's version did not write events."""
    versions: tuple[Line, ...] = ()
    """Versions of the weights for rollout workers."""
    losses: Points = ()
    held_out: Points = ()
    step_times: tuple[float, ...] = ()
    """Milliseconds per step, from metrics.jsonl."""
    summary: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None
    section: CompressConfig | None = None
    """Compression section of `config`. None if it has none, or none that this version accepts."""


def read_baseline(directory: Path) -> Run:
    """Read the run in `directory` that another one is compared with. It may be one without this package.

    Raises:
        DataError: `directory` does not exist, or holds neither losses nor times of steps.
    """
    run = _run(directory, _read(directory))
    if not (run.steps or run.losses or run.held_out or run.step_times):
        raise DataError(
            f"{directory}: --baseline: holds neither losses nor times of steps (none of metrics.jsonl, "
            f"{STATISTICS}, trainer_state.json, checkpoint-* with lines in it); pass the output directory of a run"
        )
    return run


def read_run(directory: Path, config: Path | None = None) -> Run:
    """Read the run in `directory`.

    Args:
        directory: Output directory of the run, or the directory of its compression.jsonl.
        config: Configuration to use in place of the one that the run left.

    Raises:
        DataError: `directory` does not exist or holds no statistics.
        ConfigError: `config` cannot be read.
    """
    found = _read(directory, config)
    if not found.statistics:
        raise DataError(
            f"{found.monitor}: holds no {STATISTICS} with measured steps; set monitor.path in the section and train "
            "again, or pass the directory that has this file"
        )
    return _run(directory, found)


def _read(directory: Path, config: Path | None = None) -> RunDirectory:
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; pass the output directory of a run, or its monitor.path")
    return read_directory(directory, None if config is None else read_ds_config(config))


def _run(directory: Path, found: RunDirectory) -> Run:
    # Statistics have losses only with some settings, and never in the first step.
    statistics = tuple(dropwhile(lambda line: line.get("loss") is None, found.statistics))
    logged = (found.metrics, "train_loss"), (statistics, "loss"), (found.trainer_log, "loss")
    return Run(
        directory,
        found.statistics,
        None if found.events is None else tuple(event for event in found.events if not event.get("island")),
        found.versions,
        max((_points(lines, key) for lines, key in logged), key=len),
        max(_points(found.metrics, "eval_loss"), _points(found.trainer_log, "eval_loss"), key=len),
        tuple(1e3 * line["step_time_s"] for line in found.metrics if line.get("step_time_s") is not None),
        found.summary,
        found.ds_config,
        _section(found.ds_config),
    )


def _section(config: Line | None) -> CompressConfig | None:
    try:
        return CompressConfig.model_validate(with_preset(config or {}))
    except ValidationError:
        return None


def _points(lines: Sequence[Line], key: str) -> Points:
    """Return the values of `key` by step. A null means "not finite" (NaN)."""
    found = ((int(line["step"]), line[key]) for line in drop_replaced(line for line in lines if key in line))
    return tuple((step, math.nan if value is None else float(value)) for step, value in found)
