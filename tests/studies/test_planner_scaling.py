from pathlib import Path

import pytest

from launch.studies.planner_scaling import main, measure


def test_a_cell_is_printed_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "scaling.png"
    where = ["--models", "70B", "--sizes", "512", "--gpus", "A100", "--rates", "100"]
    assert main([*where, "--output", str(file)]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("70B, 512")
    assert "/" in row
    assert file.read_bytes().startswith(b"\x89PNG")


def test_compression_gains_more_on_a_slow_network() -> None:
    gains = measure("A100", "70B", 2048, [10, 1600]).gains
    slow, fast = gains[10][0], gains[1600][0]
    assert slow is not None
    assert fast is not None
    assert slow > 1.2 > 1.1 > fast
