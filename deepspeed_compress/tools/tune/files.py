"""The files of a trial, by the names that its processes and the search agree on."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION
from deepspeed_compress.tools.run_directory import read_lines, read_statistics
from deepspeed_compress.tools.tune.halving import Result
from deepspeed_compress.tools.tune.space import Candidate
from deepspeed_compress.training.records import write_json

__all__ = [
    "CONFIG",
    "LINES",
    "LOG",
    "TRIAL",
    "Task",
    "figures",
    "finished_before",
    "save_result",
    "steps_done",
    "trial_config",
]

TRIAL = "deepspeed_compress_trial"
"""Key beside the section, in the file of a trial alone: its `Task`. DeepSpeed keeps top-level keys that it does not
know. Launchers pass files to other machines more surely than environment variables."""
CONFIG, LOG, LINES, RESULT, STATISTICS = "ds_config.json", "stdout.log", "trial.jsonl", "result.json", "statistics"
MEASURED_EVERY = 5
"""Optimizer steps between statistics, so that taking them does not show in the median time of a step."""
LAST_PART, LEAST = 4, 5
"""The loss counts over the last fourth of the steps, and over five at least."""
FIRST_PART = 5
"""The first fifth of the steps is for warming up, and not measured; three at least."""
_LOGGERS = ("tensorboard", "wandb", "comet", "csv_monitor")
"""Loggers of DeepSpeed: a trial is none of the user's runs."""
_LATER = ("guard", "adaptive")
"""Keys of the section that change settings in mid-run: a trial is to show the settings it is for."""


@dataclass(frozen=True)
class Task:
    """What the processes of a trial are to do: `steps` optimizer steps, and leave the figures in `directory`."""

    steps: int
    directory: str

    @property
    def lines(self) -> Path:
        return Path(self.directory) / LINES


def trial_config(ds_config: Mapping[str, Any], candidate: Candidate, task: Task) -> dict[str, Any]:
    """The file of a trial: `ds_config` with the candidate's section, its schedule fit to so few steps.

    There is no ramp, and there are no phases; warm-up is shortened to a fifth of the steps.
    """
    section = {key: value for key, value in candidate.section.items() if key not in _LATER}
    most = task.steps // FIRST_PART
    section["gradients"] = _shortened(candidate.section.get("gradients", {}), "density_warmup_steps", most)
    warmup = _shortened(candidate.section.get("schedule", {}), "warmup_steps", most).get("warmup_steps", 0)
    section["schedule"] = {"warmup_steps": warmup}
    section["monitor"] = {"every": MEASURED_EVERY, "path": str(Path(task.directory) / STATISTICS)}
    if candidate.config.gradients.method != "none":
        section["monitor"]["cosine_every"] = 2 * MEASURED_EVERY
    silent = {key: {**ds_config[key], "enabled": False} for key in _LOGGERS if isinstance(ds_config.get(key), dict)}
    return {**ds_config, **silent, SECTION: section, TRIAL: asdict(task)}


def _shortened(settings: Mapping[str, Any], key: str, most: int) -> dict[str, Any]:
    return {**settings, key: min(settings[key], most)} if key in settings else dict(settings)


def steps_done(directory: Path) -> int:
    """How far a running trial is, to the last measured step."""
    lines = read_statistics(directory / STATISTICS)
    return int(lines[-1]["step"]) if lines else 0


def figures(directory: Path) -> dict[str, Any]:
    """Fields of `Result` that the lines of a trial tell."""
    lines = read_lines(directory / LINES)
    late = lines[max(3, len(lines) // FIRST_PART) :]
    cosines = [line["cosine"] for line in late if line["cosine"] is not None]
    return {
        "loss": statistics.fmean(line["loss"] for line in lines[-max(LEAST, len(lines) // LAST_PART) :]),
        "step_ms": statistics.median(line["step_ms"] for line in late),
        "bytes": statistics.fmean(line["bytes"] for line in late if line["bytes"] is not None),
        "cosine": statistics.fmean(cosines) if cosines else None,
    }


def save_result(directory: Path, result: Result) -> None:
    """Write it down, whole or not at all: that makes the trial one that need not be repeated."""
    write_json(directory / RESULT, asdict(result))


def finished_before(directory: Path, ds_config: Mapping[str, Any]) -> Result | None:
    """The result of a trial of the same file that has finished, if there is one."""
    try:
        same = json.loads((directory / CONFIG).read_text(encoding="utf-8")) == ds_config
        fields = json.loads((directory / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    result = Result(**{**fields, "tail": tuple(fields["tail"])})
    return result if same and result.finished else None
