"""The fit of the constants, and its error for published runs that it has not seen."""

import csv
from dataclasses import astuple

import numpy as np
import pytest

from deepspeed_compress.planner.constants import CALIBRATED, Constants
from launch.studies.planner_calibration import fit, leave_one_out, predict_run
from launch.studies.published_runs import CALIBRATION, read_run

RUNS = [read_run(row) for row in csv.DictReader(CALIBRATION.read_text(encoding="utf-8").splitlines())]


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
