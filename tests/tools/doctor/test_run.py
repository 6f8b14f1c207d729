"""Reading the files of runs: old, unfinished, resumed and damaged ones, and those of Trainer."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.errors import ConfigError, DataError
from deepspeed_compress.tools.doctor.case import Case, read_run
from tests.support.synthetic_runs import HEALTHY, config


def write(file: Path, lines: Sequence[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def measured(steps: Sequence[int], **more: Any) -> list[dict[str, Any]]:
    return [{"step": step, **HEALTHY, **more} for step in steps]


def test_all_files_of_the_training_program_are_read(tmp_path: Path) -> None:
    write(tmp_path / "compression.jsonl", measured(range(1, 5), loss=None))
    write(tmp_path / "events.jsonl", [{"step": 2, "kind": "schedule", "reason": ""}])
    lines = [{"step": 2, "train_loss": 3.0, "step_time_s": 0.5}, {"step": 2, "eval_loss": 3.5}]
    write(tmp_path / "metrics.jsonl", [*lines, {"step": 4, "train_loss": math.nan}])
    (tmp_path / "summary.json").write_text('{"steps": 4}')
    (tmp_path / "ds_config.json").write_text(json.dumps(config()))
    run = read_run(tmp_path)
    assert run.losses[0] == (2, 3.0)
    assert math.isnan(run.losses[1][1])
    assert (run.held_out, run.step_times) == (((2, 3.5),), (500.0,))
    assert run.events is not None
    assert run.section is not None
    assert [event["kind"] for event in run.events] == ["schedule"]


def test_a_loss_that_was_never_finite_is_nan(tmp_path: Path) -> None:
    """Statistics without a guard have no loss, which is unknown then."""
    write(tmp_path / "compression.jsonl", measured(range(1, 5), loss=None))
    assert read_run(tmp_path).losses == ()
    write(tmp_path / "metrics.jsonl", [{"step": step, "train_loss": math.nan} for step in (1, 2)])
    assert [step for step, loss in read_run(tmp_path).losses if math.isnan(loss)] == [1, 2]


def test_configuration_points_to_statistics_in_another_directory(tmp_path: Path) -> None:
    write(tmp_path / "statistics/compression.jsonl", measured([1]))
    (tmp_path / "run").mkdir()
    given = config(monitor={"path": str(tmp_path / "statistics")})
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert len(read_run(tmp_path / "run", tmp_path / "config.json").steps) == 1


def test_losses_of_trainer_are_read_from_the_newest_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "compression.jsonl", measured([1], loss=None))
    for step in (10, 20):
        history = [{"step": at, "loss": float(at)} for at in range(5, step + 1, 5)]
        (tmp_path / f"checkpoint-{step}").mkdir()
        state = {"global_step": step, "log_history": [*history, {"step": step, "eval_loss": 9.0}, {"train_runtime": 1}]}
        (tmp_path / f"checkpoint-{step}/trainer_state.json").write_text(json.dumps(state))
    run = read_run(tmp_path)
    assert run.losses == ((5, 5.0), (10, 10.0), (15, 15.0), (20, 20.0))
    assert run.held_out == ((20, 9.0),)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no compression.jsonl with measured steps; set monitor.path in the section"),
        ({"compression.jsonl": '{"step": 1}\n', "ds_config.json": "{"}, "ds_config.json: not JSON"),
        (
            {"compression.jsonl": '{"step": 1}\n', "ds_config.json": "[]"},
            r"ds_config.json: list \(allowed: an object\)",
        ),
    ],
)
def test_error_names_the_damaged_file(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_run(tmp_path)


def test_missing_directory_or_configuration_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such directory; pass the output directory"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no such file"):
        read_run(tmp_path, tmp_path / "none.json")


def test_missing_files_leave_fields_empty(tmp_path: Path) -> None:
    write(tmp_path / "compression.jsonl", [{"step": 1, "method": "blockwise", "bytes_sent": 3}])
    run = read_run(tmp_path)
    assert (run.config, run.section, run.events) == (None, None, None)
    assert (run.losses, run.step_times) == ((), ())
    assert Case(run).lacks("config")
    write(tmp_path / "compression.jsonl", measured([1], settings="blockwise bits=4"))
    assert read_run(tmp_path).events == ()


def test_an_empty_configuration_replaces_the_one_that_the_run_left(tmp_path: Path) -> None:
    write(tmp_path / "run/compression.jsonl", measured([1]))
    (tmp_path / "run/ds_config.json").write_text(json.dumps(config()))
    (tmp_path / "empty.json").write_text("{}")
    run = read_run(tmp_path / "run", tmp_path / "empty.json")
    assert (run.config, run.section) == ({}, None)
    assert Case(run).lacks("config")


def test_loss_that_becomes_null_is_nan(tmp_path: Path) -> None:
    lines = [{"step": step, **HEALTHY, "loss": loss} for step, loss in enumerate([None, 3.0, None], start=1)]
    write(tmp_path / "compression.jsonl", lines)
    [(first, loss), (second, lost)] = read_run(tmp_path).losses
    assert (first, loss, second) == (2, 3.0, 3)
    assert math.isnan(lost)
