"""The study of gains: what a cell says, its table and its picture."""

from pathlib import Path

import pytest

from launch.studies.planner_gains import gain, main


def test_slow_networks_gain_more() -> None:
    slow, fast = (gain("7B, all parameters", "A100-80", 2, rate) for rate in (1, 25))
    assert slow.times > fast.times > 1.1
    assert slow.kind == "inside nodes"


def test_the_table_and_the_picture_have_the_chosen_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gains.png"
    assert main(["--jobs", "7B, LoRA in ZeRO 3", "--output", str(file)]) == 0
    out = capsys.readouterr().out
    assert "| 7B, LoRA in ZeRO 3 | " in out
    assert "13B" not in out
    assert file.read_bytes().startswith(b"\x89PNG")
