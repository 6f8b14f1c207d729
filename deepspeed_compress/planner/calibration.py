"""Fit of the constants to published steps, and the error of predictions for runs that the fit has not seen."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_compress.planner import fit as least_squares
from deepspeed_compress.planner.constants import Constants
from deepspeed_compress.planner.fit import Prior
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
EXPECTED = Prior(
    Constants(matmul=0.87, memory=0.75, link=0.67, kernel=8e-6),
    {"matmul": 0.05, "memory": 0.1, "link": 0.15, "kernel": 0.3},
)
"""Constants before any run is seen: public measurements of matrix products, copies, collectives, and empty kernels."""
_NOISE = 0.05
"""Relative error of a published run: two papers differ by a tenth on equal layouts."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Step of a run as an observation."""

    run: Run
    noise: float = _NOISE

    @property
    def seconds(self) -> float:
        """Measured seconds."""
        return self.run.seconds or math.nan

    def predicted(self, constants: Constants) -> float:
        """Return the predicted seconds."""
        return predict_run(self.run, constants).seconds


def predict_run(run: Run, constants: Constants = FITTED) -> Prediction:
    """Return the prediction of a run."""
    return Predictor(run.cluster, run.model, run.software, run.seq, constants).predict(run.layout)


def fit(runs: Sequence[Run]) -> Constants:
    """Return the constants that fit published runs best."""
    return least_squares.fit([MeasuredStep(run) for run in runs], EXPECTED)


def leave_one_out(runs: Sequence[Run]) -> list[float]:
    """Return measured over predicted seconds, minus 1, of each run with constants that were fitted to the others."""
    errors = []
    for index, run in enumerate(runs):
        constants = fit([*runs[:index], *runs[index + 1 :]])
        errors.append(predict_run(run, constants).seconds / (run.seconds or math.nan) - 1)
    return errors
