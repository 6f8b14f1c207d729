"""Time to the same loss: the calculation, the table, the picture, and runs that are refused."""

import importlib.util
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.errors import UnsupportedError, install_command
from deepspeed_compress.tools.plots import check_plotting
from deepspeed_compress.tools.run_directory import METRICS, SUMMARY, read_directory
from deepspeed_compress.tools.time_to_loss import common_goal, curve, main, read_run, time_to

Lines = Sequence[Mapping[str, Any]]
SENT = {"bytes_sent_per_step": 3e6, "bytes_weights_per_step": 1e6, "bytes_uncompressed_per_step": 3e6}


def write_run(directory: Path, lines: Lines, summary: Mapping[str, Any] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        (directory / SUMMARY).write_text(json.dumps(summary))
    return directory


def lines_of(seconds: float, losses: Sequence[float]) -> Lines:
    """Return lines of steps that take `seconds`, each followed by an evaluation."""
    pairs = (
        ({"step": step, "train_loss": loss, "step_time_s": seconds}, {"step": step, "eval_loss": loss})
        for step, loss in enumerate(losses, 1)
    )
    return [line for pair in pairs for line in pair]


def test_time_counts_all_steps_but_the_first(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "train_loss": 9.0, "step_time_s": 30.0},
        {"step": 2, "train_loss": 8.0, "step_time_s": 1.0},
        {"step": 2, "eval_loss": 8.5},
        {"step": 3, "train_loss": 7.0, "step_time_s": 2.0},
        {"step": 3, "eval_loss": 7.5},
    ]
    assert curve(read_directory(write_run(tmp_path, lines)).metrics) == [(1.0, 8.5), (3.0, 7.5)]


def test_the_time_to_a_loss_is_interpolated_between_evaluations() -> None:
    points = [(1.0, 8.0), (3.0, 7.0), (4.0, 7.5), (5.0, 6.0)]
    assert time_to(7.5, points) == 2.0
    assert time_to(8.0, points) == 1.0
    assert time_to(6.5, points) == pytest.approx(4.0 + 2 / 3)
    assert time_to(5.0, points) is None


def test_the_command_prints_a_table_and_draws_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    slow = write_run(tmp_path / "slow", lines_of(4.0, [8, 7, 6]), SENT)
    fast = write_run(tmp_path / "fast", lines_of(1.0, [8, 7, 6]), {"bytes_sent_per_step": 5e5})
    picture = tmp_path / "loss.png"
    monkeypatch.setattr(sys, "argv", ["x", str(slow), str(fast), "--title", "two hosts", "--picture", str(picture)])
    assert main() == 0
    title, *rows = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert title.strip() == "two hosts"
    assert "seconds to 6.000" in rows[0]
    cells = [row.split() for row in rows if "slow" in row or "fast " in row]
    assert cells[-2:] == [
        ["slow", "6.000", "4,000", "4.00", "8.0", "1.0"],
        ["fast", "6.000", "1,000", "0.50", "2.0", "4.0"],
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("lines", "summary", "message"),
    [(lines_of(1.0, [8.0]), None, "no summary.json"), ([{"step": 1, "step_time_s": 1.0}], {}, "--eval-every")],
)
def test_runs_that_cannot_be_compared_are_refused(
    lines: Lines,
    summary: Mapping[str, Any] | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", str(write_run(tmp_path / "run", lines, summary))])
    assert main() == 1
    assert message in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=re.escape(install_command("plot"))):
        check_plotting("--picture")


def test_a_line_of_several_steps_counts_them_all() -> None:
    lines = [{"step": 10, "step_time_s": 0.5}, {"step": 10, "eval_loss": 8.0}, {"step": 14, "step_time_s": 1.0}]
    assert curve([*lines, {"step": 14, "eval_loss": 7.0}]) == [(5.0, 8.0), (9.0, 7.0)]


def test_the_goal_is_a_loss_that_all_reach(tmp_path: Path) -> None:
    slow = read_run(write_run(tmp_path / "slow", lines_of(4.0, [8, 7, 6]), {}))
    fast = read_run(write_run(tmp_path / "fast", lines_of(1.0, [8, 7, 6.5, 6.6]), {}))
    assert common_goal([slow, fast]) == 6.5
    assert (slow.sent, slow.step_seconds, fast.step_seconds) == (None, 4.0, 1.0)
