"""The comparisons of runs: their settings are valid, and figures of runs are computed correctly."""

import json
from pathlib import Path

import pytest

from deepspeed_compress.config import SECTION
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.tools.run_directory import METRICS, read_metrics
from deepspeed_compress.tools.time_to_loss import curve
from launch.studies.compare_runs import BASELINE, FILES, OF_LOSS, OF_TIME, main, traffic
from tests.studies.toy import ToyFiles
from tests.support.runs import write_lines


@pytest.mark.parametrize("name", OF_TIME)
def test_its_settings_are_valid(name: str) -> None:
    ds_config = json.loads(FILES.get(name, Path("configs/zero1_int4_weights.json")).read_text())
    assert not find_problems(ds_config | ({SECTION: OF_TIME[name]} if OF_TIME[name] else {}))


@pytest.mark.parametrize("name", OF_LOSS)
def test_settings_of_the_comparison_of_losses_are_valid(name: str) -> None:
    ds_config = json.loads(Path("configs/zero2_none.json").read_text())
    assert not find_problems({**ds_config, SECTION: ds_config[SECTION] | OF_LOSS[name]})


def test_the_reference_is_uncompressed() -> None:
    assert OF_TIME[BASELINE] == OF_LOSS[BASELINE] == {"gradients": {"method": "none"}}


def test_steps_that_a_resumed_run_has_abandoned_do_not_count(tmp_path: Path) -> None:
    """The second process continued from step 2, so neither bytes nor times of abandoned steps count."""
    first, second = ({"id": "a", "started": f"2026-01-0{day}", "since": since} for day, since in ((1, 0), (2, 2)))
    sent = [(2, 10, first), (4, 1000, first), (3, 20, second), (4, 30, second)]
    lines = [{"step": step, "bytes_sent": size, "bytes_uncompressed": 60, "run": run} for step, size, run in sent]
    write_lines(tmp_path / "compression.jsonl", lines)
    assert traffic(tmp_path) == (20, 3)
    metrics = [{"step": step, "step_time_s": seconds} for step, seconds in ((1, 9.0), (2, 1.0), (3, 500.0))]
    metrics += [{"step": 2, "eval_loss": 8.0}, {"step": 3, "step_time_s": 2.0}, {"step": 3, "eval_loss": 7.0}]
    write_lines(tmp_path / METRICS, metrics)
    assert curve(read_metrics(tmp_path)) == [(1.0, 8.0), (3.0, 7.0)]


@pytest.mark.slow
def test_losses_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = ToyFiles(tmp_path)
    arguments = ["--data", str(files.text), "--model", str(files.model), "--steps", "2"]
    arguments += ["--output-dir", str(tmp_path / "out"), "--settings", "none", "int4", "--seeds", "0"]
    assert main(["loss", *arguments, "--seq-len", "16"]) == 0
    rows = [line.split("│") for line in capfd.readouterr().out.splitlines() if "│" in line]
    assert [row[1].strip() for row in rows] == ["none", "none", "int4", "int4"]
    assert float(rows[2][6]) > 4
    times = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("summary.json")}
    assert main(["loss", *arguments, "--seq-len", "16"]) == 0
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("summary.json")} == times
