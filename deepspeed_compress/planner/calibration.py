"""Fit of the four constants to published steps, and the error of predictions for runs that the fit has not seen."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from deepspeed_compress.planner.gpus import Constants
from deepspeed_compress.planner.predict import Prediction, Predictor
from deepspeed_compress.planner.published import Run


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Range of the runs that the constants are fitted to."""

    software: str
    parameters: tuple[float, float]
    gpus: int
    network: float


CALIBRATED = Calibrated("megatron", (1.6e9, 1.02e12), 3072, 200e9)
"""The 18 runs of `published_steps.csv`, whose nodes have eight cards of 200 Gbit/s."""
FITTED = Constants()
"""Result of `fit` for the runs of `published_steps.csv`."""
EXPECTED = Constants(matmul=0.87, memory=0.75, link=0.67, kernel=8e-6)
"""Constants before any run is seen: public measurements of matrix products, copies, collectives, and empty kernels."""
_EXPECTED_ERRORS = (0.05, 0.1, 0.15, 0.3)
"""Their relative standard errors, in the order of their fields."""
_NOISE = 0.05
"""Relative error of a published run: two papers differ by a tenth on equal layouts."""
_SMALL = 1e-3


def predict_run(run: Run, constants: Constants = FITTED) -> Prediction:
    """Return the prediction of a published run."""
    return Predictor(run.cluster, run.model, run.software, run.seq, constants).predict(run.layout)


def fit(runs: Sequence[Run], rounds: int = 3) -> Constants:
    """Return the constants that fit `runs` best: least squares of logarithms, with `EXPECTED` as a prior."""
    logs = [math.log(value) for value in astuple(EXPECTED)]
    for _ in range(rounds):
        residuals, slopes = _residuals(runs, logs)
        change = _solve(residuals, slopes, logs)
        logs = [value + step for value, step in zip(logs, change, strict=True)]
    return _constants(logs)


def leave_one_out(runs: Sequence[Run]) -> list[float]:
    """Return measured over predicted seconds, minus 1, of each run with constants that were fitted to the others."""
    errors = []
    for index, run in enumerate(runs):
        constants = fit([*runs[:index], *runs[index + 1 :]])
        errors.append(predict_run(run, constants).seconds / (run.seconds or math.nan) - 1)
    return errors


def quantile(errors: Sequence[float], share: float) -> float:
    """Return the quantile of the absolute errors, interpolated linearly."""
    ordered = sorted(map(abs, errors))
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def _constants(logs: Sequence[float]) -> Constants:
    return Constants(*map(math.exp, logs))


def _logs(runs: Sequence[Run], constants: Constants) -> list[float]:
    return [math.log(predict_run(run, constants).seconds / (run.seconds or math.nan)) for run in runs]


def _residuals(runs: Sequence[Run], logs: Sequence[float]) -> tuple[list[float], list[list[float]]]:
    """Return the logarithmic errors, and their derivatives by each constant's logarithm."""
    here = _logs(runs, _constants(logs))
    slopes = []
    for index in range(len(logs)):
        moved = [value + _SMALL * (place == index) for place, value in enumerate(logs)]
        there = _logs(runs, _constants(moved))
        slopes.append([(after - before) / _SMALL for before, after in zip(here, there, strict=True)])
    return here, slopes


def _solve(residuals: Sequence[float], slopes: Sequence[Sequence[float]], logs: Sequence[float]) -> list[float]:
    """Return the Gauss-Newton step of the least-squares problem with the prior."""
    usual = [math.log(value) for value in astuple(EXPECTED)]
    size = len(logs)
    matrix = [
        [_dot(slopes[i], slopes[j]) / _NOISE**2 + (i == j) / _EXPECTED_ERRORS[i] ** 2 for j in range(size)]
        for i in range(size)
    ]
    right = [
        -_dot(slopes[i], residuals) / _NOISE**2 - (logs[i] - usual[i]) / _EXPECTED_ERRORS[i] ** 2 for i in range(size)
    ]
    return _gauss(matrix, right)


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Return the solution of a small linear system with a positive definite matrix."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for other in range(size):
            if other != pivot:
                factor = rows[other][pivot] / rows[pivot][pivot]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[pivot], strict=True)]
    return [rows[index][-1] / rows[index][index] for index in range(size)]
