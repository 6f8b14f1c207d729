"""The command line and the files of a trial."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.config import SECTION
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.tune import trials
from deepspeed_compress.tools.tune.search import Result
from deepspeed_compress.tools.tune.space import SPACE, Candidate, find_candidates
from deepspeed_compress.tools.tune.trials import (
    TRIAL,
    Task,
    figures,
    finished_before,
    for_trial,
    trial_config,
    with_config,
)

DIRECTORY = Path("/results/exps/int4")
FILE = DIRECTORY / "ds_config.json"


@pytest.mark.parametrize(
    "option",
    ["--deepspeed ds.json", "--config=ds.json", "--deepspeed_config_file=./ds.json", "ds.json --copy=ds.json"],
)
def test_the_file_is_replaced_whatever_names_it(option: str) -> None:
    given = ["--num_gpus", "2", "train.py", *option.split(), "--lr", "1"]
    expected = option.replace("./ds.json", "ds.json").replace("ds.json", str(FILE))
    assert with_config(given, Path("ds.json"), FILE) == ["--num_gpus", "2", "train.py", *expected.split(), "--lr", "1"]


def test_the_error_for_a_command_without_the_file_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"--config ds.json: no argument .* SCRIPT --deepspeed ds.json"):
        with_config(["train.py", "--lr", "1", "eyJhIjogMX0=", "x" * 5000], Path("ds.json"), FILE)


@pytest.mark.parametrize("name", ["--output_dir", "--output-dir"])
def test_a_trial_writes_in_a_place_of_its_own(name: str) -> None:
    given = ["train.py", "--deepspeed", "ds.json", name, "runs/mine", "--logs={trial}/logs", f"{name}=runs/mine"]
    assert for_trial(given, Path("ds.json"), FILE, DIRECTORY) == [
        "train.py",
        "--deepspeed",
        str(FILE),
        name,
        f"{DIRECTORY}/output",
        f"--logs={DIRECTORY}/logs",
        f"{name}={DIRECTORY}/output",
    ]


DS_CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 2},
    "wandb": {"enabled": True, "project": "mine"},
    "custom": {"key": 1},
}


def config_of(section: dict[str, Any], steps: int = 30) -> dict[str, Any]:
    return trial_config(DS_CONFIG, Candidate("x", section), Task(steps, "/results/x"))


def test_the_file_is_the_users_with_the_candidates_section() -> None:
    section = {"gradients": {"bits": 4}, "seed": 1, "monitor": {"every": 100, "path": "runs/mine"}}
    found = config_of(section)
    assert found["train_micro_batch_size_per_gpu"] == 4
    assert found["custom"] == {"key": 1}
    assert found["wandb"] == {"enabled": False, "project": "mine"}
    assert found[TRIAL] == {"steps": 30, "directory": "/results/x"}
    assert found[SECTION] == {
        "gradients": {"bits": 4},
        "seed": 1,
        "schedule": {"warmup_steps": 0},
        "monitor": {"every": 5, "path": "/results/x/statistics"},
    }


@pytest.mark.parametrize(("asked", "steps", "given"), [(200, 30, 6), (200, 270, 54), (4, 30, 4)])
def test_warming_up_is_a_fifth_of_a_trial_at_most(asked: int, steps: int, given: int) -> None:
    gradients = {"method": "topk", "density_warmup_steps": asked}
    found = config_of({"gradients": gradients, "schedule": {"warmup_steps": asked}}, steps)[SECTION]
    assert found["schedule"] == {"warmup_steps": given}
    assert found["gradients"]["density_warmup_steps"] == given


def test_every_candidate_has_a_valid_file() -> None:
    own = {**DS_CONFIG, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.0, 0.9]}}}
    kept, _ = find_candidates(own)
    assert len(kept) == len(SPACE) + 1
    for candidate in kept:
        assert find_problems(trial_config(own, candidate, Task(10, "/x"))) == []


def write_lines(directory: Path, lines: list[dict[str, Any]]) -> None:
    (directory / "trial.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_figures_leave_the_beginning_out(tmp_path: Path) -> None:
    """Times and bytes are without the first fifth of the steps, and the loss is that of the last fourth."""
    lines = [
        {
            "step": step,
            "loss": 100.0 if step <= 15 else float(step),
            "step_ms": 1000.0 if step <= 4 else (50.0 if step == 9 else 7.0),
            "bytes": 10**6 if step <= 4 else (step if step % 5 == 0 else None),
        }
        for step in range(1, 21)
    ]
    write_lines(tmp_path, lines)
    assert figures(tmp_path) == {"loss": 18.0, "step_ms": 7.0, "bytes": 12.5}
    lines[-1]["loss"] = math.nan
    write_lines(tmp_path, lines)
    assert math.isnan(figures(tmp_path)["loss"])


def test_only_finished_trials_with_the_same_file_and_command_are_reused(tmp_path: Path) -> None:
    result = Result("a", "finished", 1.5, 2.5, 3.5, 4.5, "", ("x", "y"))
    assert finished_before(tmp_path, {"a": 1}, "train.py") is None
    (tmp_path / trials.CONFIG).write_text('{"a": 1}')
    (tmp_path / trials.COMMAND).write_text("train.py")
    assert finished_before(tmp_path, {"a": 1}, "train.py") is None
    write_json(tmp_path / trials.RESULT, asdict(result))
    assert finished_before(tmp_path, {"a": 1}, "train.py") == result
    assert finished_before(tmp_path, {"a": 2}, "train.py") is None
    assert finished_before(tmp_path, {"a": 1}, "other.py") is None
    write_json(tmp_path / trials.RESULT, asdict(Result("a", "failed", error="out of memory")))
    assert finished_before(tmp_path, {"a": 1}, "train.py") is None


def test_it_may_be_the_launchers(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    given = ["--use_deepspeed", "--deepspeed_config_file", str(config), "train.py", "--deepspeed", "another.json"]
    assert with_config(given, config, FILE) == [*given[:2], str(FILE), *given[3:]]


def test_nothing_changes_settings_during_a_trial() -> None:
    schedule = {"phases": [{"until": 0.5}, {"gradients": {"bits": 8}}], "total_steps": 9, "ramp": {"steps": 3}}
    found = config_of({"guard": {}, "schedule": schedule})[SECTION]
    assert "guard" not in found
    assert found["schedule"] == {"warmup_steps": 0}


@pytest.mark.parametrize("text", ['{"name": "int4", "unknown": 1, "tail": []}', "[]", "{}", "{", '{"tail": null}'])
def test_a_result_of_another_version_is_measured_again(text: str, tmp_path: Path) -> None:
    write_json(tmp_path / "ds_config.json", DS_CONFIG)
    (tmp_path / "cmd.txt").write_text("")
    (tmp_path / "result.json").write_text(text)
    assert finished_before(tmp_path, DS_CONFIG, "") is None
