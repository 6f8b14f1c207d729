"""The fit of the constants, and its error for published runs that it has not seen."""

import csv
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from deepspeed_compress.planner.gpus import Constants
from deepspeed_compress.planner.predict import PROGRAMS
from deepspeed_compress.planner.search import FITTED_GPUS, FITTED_NETWORK, FITTED_PARAMETERS
from launch.studies.planner_calibration import (
    Judged,
    count_verdicts,
    fit,
    leave_one_out,
    left_out_error,
    predict_memory,
    predict_run,
    program_error,
    wrong,
)
from launch.studies.published_runs import CALIBRATION, OTHERS, Run, read_run


def runs_of(file: Path) -> list[Run]:
    return [read_run(row) for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines())]


RUNS, OTHER_RUNS = runs_of(CALIBRATION), runs_of(OTHERS)


def test_runs_that_the_fit_has_not_seen_are_predicted() -> None:
    errors = leave_one_out(RUNS)
    assert len(errors) == 18
    assert np.quantile(np.abs(errors), 0.5) <= 0.04
    assert np.quantile(np.abs(errors), 0.9) <= 0.09


def test_the_constants_in_use_are_those_of_the_fit() -> None:
    assert astuple(Constants()) == pytest.approx(astuple(fit(RUNS)), rel=2e-3)


def test_all_runs_lie_in_the_range_that_is_stated() -> None:
    assert {run.software.name for run in RUNS} == {"megatron"}
    assert max(run.cluster.gpus for run in RUNS) == FITTED_GPUS
    assert {run.cluster.network for run in RUNS if run.cluster.nodes > 1} == {FITTED_NETWORK}
    sizes = [run.model.parameters for run in RUNS]
    assert FITTED_PARAMETERS[0] <= min(sizes)
    assert max(sizes) <= FITTED_PARAMETERS[1]


def test_most_intervals_hold() -> None:
    inside = [one.interval[0] <= (run.seconds or 0) <= one.interval[1] for run in RUNS for one in [predict_run(run)]]
    assert sum(inside) >= 0.8 * len(inside)


@pytest.fixture(scope="module")
def judged() -> list[Judged]:
    """Predictions of the runs of other programs."""
    return [Judged.of(run) for run in OTHER_RUNS if run.seconds]


def test_intervals_hold_for_sources_that_were_left_out(judged: list[Judged]) -> None:
    alike = {name: [one for one in judged if one.program == name] for name in PROGRAMS}
    held = [one.holds(left_out_error(one, alike[one.program], judged)) for one in judged]
    assert len({one.source for one in judged}) > 20
    assert 0.75 <= sum(held) / len(held) <= 0.9
    errors = np.abs(np.expm1([one.error for one in judged]))
    assert np.median(errors) <= 0.1
    assert np.quantile(errors, 0.9) <= 0.25


def test_errors_of_programs_in_use_are_those_of_the_fit(judged: list[Judged]) -> None:
    for name in set(PROGRAMS) - {"megatron"}:
        assert PROGRAMS[name] == pytest.approx(program_error([one for one in judged if one.program == name]), abs=0.01)


def test_few_verdicts_about_memory_are_wrong() -> None:
    runs = [*RUNS, *OTHER_RUNS]
    found = count_verdicts(runs)
    fits, tight = ([found[ran, verdict] for ran in (True, False)] for verdict in ("fits", "tight"))
    assert found.total() == len(runs) > 400
    assert wrong(found) <= 0.05 * len(runs)
    assert fits[1] <= 0.05 * sum(fits)
    assert sum(tight) <= 0.15 * len(runs)


def test_many_published_runs_were_out_of_memory() -> None:
    failed = [run for run in OTHER_RUNS if not run.ran]
    assert len(failed) >= 50
    assert len({run.source for run in failed}) >= 20
    assert {run.layout.zero for run in failed} == {0, 1, 2, 3}
    assert {run.layout.recompute for run in failed} == {"none", "full"}
    assert not any(run.seconds or run.memory for run in failed)


def test_memory_is_predicted() -> None:
    errors = [predict_memory(run).total / run.memory - 1 for run in OTHER_RUNS if run.memory]
    assert np.median(np.abs(errors)) <= 0.12
    assert np.quantile(np.abs(errors), 0.9) <= 0.3
