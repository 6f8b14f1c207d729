"""Compare predicted with published training steps, row by row.

usage: python -m launch.studies.planner_calibration [FILE.csv ...]

Without a file, the constants are fitted to all but one of the 18 runs of the package, and predict the one that is left
out. With files, the package's constants predict their rows. `launch/studies/published_runs.py` lists columns.
"""

import csv
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.constants import Constants, Prior
from deepspeed_compress.planner.constants import fit as fit_constants
from deepspeed_compress.planner.predict import Prediction, Predictor
from launch.studies.harness import new_parser
from launch.studies.published_runs import CALIBRATION, Run, read_run

EXPECTED = Prior(
    Constants(matmul=0.87, memory=0.75, link=0.67, kernel=8e-6),
    {"matmul": 0.05, "memory": 0.1, "link": 0.15, "kernel": 0.3},
)
"""Constants before any run is seen: public measurements of matrix products, copies, collectives, and empty kernels."""
NOISE = 0.05
"""Relative error of a published run: two papers differ by a tenth on equal layouts."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Step of a run as an observation."""

    run: Run
    noise: float = NOISE

    @property
    def seconds(self) -> float:
        """Measured seconds."""
        return self.run.seconds or math.nan

    def predicted(self, constants: Constants) -> float:
        """Return the predicted seconds."""
        return predict_run(self.run, constants).seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each run, and the errors of all."""
    parser = new_parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.csv", help="published runs")
    files: list[Path] = parser.parse_args(arguments).files
    runs = list(read(files or [CALIBRATION]))
    predictions = [predict_run(run) for run in runs]
    pairs = list(zip(runs, predictions, strict=True))
    errors = [one.seconds / run.seconds - 1 if run.seconds else None for run, one in pairs]
    if not files:
        errors = list(leave_one_out(runs))
        print(f"fitted to all: {fit(runs)}\nin use:        {Constants()}")
    for run, prediction, error in zip(runs, predictions, errors, strict=True):
        print(line(run, prediction, error))
    print_errors(runs, predictions, [error for error in errors if error is not None])
    return 0


def predict_run(run: Run, constants: Constants | None = None) -> Prediction:
    """Return the prediction of a run, with the package's constants by default."""
    return Predictor(run.cluster, run.model, run.software, run.seq, constants or Constants()).predict(run.layout)


def fit(runs: Sequence[Run]) -> Constants:
    """Return the constants that fit published runs best."""
    return fit_constants([MeasuredStep(run) for run in runs], EXPECTED)


def leave_one_out(runs: Sequence[Run]) -> list[float]:
    """Return measured over predicted seconds, minus 1, of each run with constants that were fitted to the others."""
    errors = []
    for index, run in enumerate(runs):
        constants = fit([*runs[:index], *runs[index + 1 :]])
        errors.append(predict_run(run, constants).seconds / (run.seconds or math.nan) - 1)
    return errors


def read(files: Sequence[Path]) -> Iterator[Run]:
    """Yield the runs of all files, and print which rows cannot be read."""
    for file in files:
        with file.open(encoding="utf-8", newline="") as lines:
            for number, row in enumerate(csv.DictReader(lines), 2):
                try:
                    yield read_run(row)
                except (KeyError, ValueError, ConfigError) as error:
                    print(f"{file}:{number}: {type(error).__name__}: {error}", file=sys.stderr)


def line(run: Run, prediction: Prediction, error: float | None) -> str:
    """Return the line of a run: measured and predicted seconds with the interval, the error, and memory."""
    low, high = prediction.interval
    measured = f"{run.seconds:9.3f}" if run.seconds else " " * 9
    deviation = f"{100 * error:+6.1f} %" if error is not None else " " * 8
    memory = f" {run.memory / 1e9:6.1f} GB" if run.memory else " " * 10
    times = f"{measured} s, predicted {prediction.seconds:9.3f} ({low:9.3f} to {high:9.3f}) {deviation}"
    return f"{run.name[:70]:70} {times}{memory}, predicted {prediction.memory.total / 1e9:6.1f} GB"


def print_errors(runs: Sequence[Run], predictions: Sequence[Prediction], errors: Sequence[float]) -> None:
    """Print the quantiles of the errors of step times and of memory, and how often the intervals hold."""
    pairs = list(zip(runs, predictions, strict=True))
    inside = [one.interval[0] <= run.seconds <= one.interval[1] for run, one in pairs if run.seconds]
    memory = [one.memory.total / run.memory - 1 for run, one in pairs if run.memory]
    for name, found in (("step", errors), ("memory", memory)):
        if found:
            print(f"{name}: {len(found)} rows, median {_percent(found, 0.5)}, 90th {_percent(found, 0.9)}")
    if inside:
        print(f"intervals of 80 % hold in {100 * sum(inside) / len(inside):.0f} % of the rows")


def _percent(errors: Sequence[float], share: float) -> str:
    return f"{100 * np.quantile(np.abs(errors), share):.1f} %"


if __name__ == "__main__":
    sys.exit(main())
