"""The fit of the constants, and its error for published runs that it has not seen."""

import csv
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from deepspeed_compress.planner.constants import CALIBRATED, Constants
from launch.studies.planner_calibration import fit, leave_one_out, main, predict_run
from launch.studies.published_runs import CALIBRATION, read_run

RUNS = [read_run(row) for row in csv.DictReader(CALIBRATION.read_text(encoding="utf-8").splitlines())]
HEAD = "source,model,layers,hidden,heads,seq,gpus,zero,mbs,gbs,step_s,tok_s_gpu,mem_gb,gpu"
ROWS = (
    "a table,Llama-2-7B,32,4096,32,4096,8,3,2,64,11.0,,60,A100-80",
    "a table,Llama-2-7B,32,4096,32,4096,8,3,2,64,,4000,,H100",
    "a table,Llama-2-7B,32,4096,32,4096,8,3,2,64,,,,abacus",
)


def test_runs_that_the_fit_has_not_seen_are_predicted() -> None:
    errors = leave_one_out(RUNS)
    assert len(errors) == 18
    assert np.quantile(np.abs(errors), 0.5) <= 0.04
    assert np.quantile(np.abs(errors), 0.9) <= 0.09


def test_the_constants_in_use_are_those_of_the_fit() -> None:
    assert astuple(Constants()) == pytest.approx(astuple(fit(RUNS)), rel=2e-3)


def test_all_runs_lie_in_the_range_that_is_stated() -> None:
    assert {run.software.name for run in RUNS} == {CALIBRATED.software}
    assert max(run.cluster.gpus for run in RUNS) == CALIBRATED.gpus
    assert {run.cluster.network for run in RUNS if run.cluster.nodes > 1} == {CALIBRATED.network}
    sizes = [run.model.parameters for run in RUNS]
    assert CALIBRATED.parameters[0] <= min(sizes)
    assert max(sizes) <= CALIBRATED.parameters[1]


def test_most_intervals_hold() -> None:
    inside = [one.interval[0] <= (run.seconds or 0) <= one.interval[1] for run in RUNS for one in [predict_run(run)]]
    assert sum(inside) >= 0.8 * len(inside)


def test_a_row_with_few_cells_takes_usual_values() -> None:
    run = read_run(
        {"model": "Llama-2-7B", "layers": "32", "hidden": "4096", "heads": "32", "seq": "4096", "gpus": "16"}
    )
    assert (run.layout.data, run.layout.zero, run.layout.recompute) == (16, 0, "none")
    assert run.model.parameters == pytest.approx(6.74e9, rel=0.01)
    assert (run.software.name, run.seconds, run.memory) == ("fsdp", None, None)


def test_tokens_per_second_become_seconds() -> None:
    cells = {"layers": "32", "hidden": "4096", "heads": "32", "seq": "2048", "gpus": "8", "mbs": "4", "gbs": "64"}
    run = read_run({**cells, "zero": "3", "tok_s_gpu": "2048", "mem_gb": "40", "software": "hf", "network": "100gbit"})
    assert run.seconds == pytest.approx(8.0)
    assert (run.memory, run.software.name, run.layout.accumulation) == (40e9, "hf", 2)
    assert run.cluster.network == pytest.approx(12.5e9)


def test_rows_of_a_table_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.csv"
    file.write_text("\n".join((HEAD, *ROWS)))
    assert main([str(file)]) == 0
    captured = capsys.readouterr()
    assert "step: 2 rows, median" in captured.out
    assert "memory: 1 rows, median" in captured.out
    assert "intervals of 80 % hold in" in captured.out
    assert f"{file}:4: ConfigError" in captured.err
