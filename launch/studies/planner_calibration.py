"""Compare predicted with published training steps.

usage: python -m launch.studies.planner_calibration [--rows] [FILE.csv ...]

Without a file, the constants are fitted to all but one of the 18 runs of the package, and predict the one that is left
out. Then the constants predict the runs of other programs, in `other_steps.csv`. The errors of programs, which make
the intervals wider, are fitted to all sources but one, and tried on the one that is left out.

With files, the package's constants predict their rows. `launch/studies/published_runs.py` lists columns.
"""

import csv
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.gpus import Constants
from deepspeed_compress.planner.measured import Observation
from deepspeed_compress.planner.measured import fit as fit_constants
from deepspeed_compress.planner.predict import PROGRAMS, QUANTILE, VERDICTS, Memory, Needs, Prediction, Verdict
from deepspeed_compress.planner.search import Job
from launch.studies.harness import new_parser
from launch.studies.published_runs import CALIBRATION, OTHERS, Run, read_run

EXPECTED = Constants(matmul=0.87, memory=0.75, link=0.67, kernel=8e-6)
"""Constants before any run is seen: public measurements of matrix products, copies, collectives, and empty kernels."""
ERRORS = {"matmul": 0.05, "memory": 0.1, "link": 0.15, "kernel": 0.3}
"""Relative standard errors of the constants that are fitted."""
NOISE = 0.05
"""Relative error of a published run: two papers differ by a tenth on equal layouts."""
LEAST_SOURCES = 3
"""Sources that the error of a program needs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors of steps and of memory, and how often intervals hold."""
    parser = new_parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.csv", help="published runs")
    parser.add_argument("--rows", action="store_true", help="print a line for each run, too")
    options = parser.parse_args(arguments)
    if options.files:
        runs = list(read(options.files))
        compare(runs, options.rows)
        print_verdicts(runs)
        return 0
    runs = list(read([CALIBRATION]))
    print(f"fitted to all: {fit(runs)}\nin use:        {Constants()}")
    compare(runs, options.rows, list(leave_one_out(runs)))
    others = list(read([OTHERS]))
    print(f"\n{len({run.source for run in others})} sources of other programs")
    compare(others, options.rows)
    print_left_out([Judged.of(run) for run in others if run.seconds])
    print_verdicts([*runs, *others])
    return 0


def compare(runs: Sequence[Run], shows_rows: bool, errors: Sequence[float | None] | None = None) -> None:
    """Print the errors of runs: those of the package's constants, or `errors`."""
    predictions = [predict_run(run) for run in runs]
    pairs = list(zip(runs, predictions, strict=True))
    errors = errors or [one.seconds / run.seconds - 1 if run.seconds else None for run, one in pairs]
    for run, prediction, error in zip(runs, predictions, errors, strict=True):
        if shows_rows:
            print(line(run, prediction, error))
    print_errors(runs, predictions, [error for error in errors if error is not None])


def count_verdicts(runs: Sequence[Run]) -> Counter[tuple[bool, Verdict]]:
    """Return how many runs that ran, and that were out of memory, have each verdict about their memory."""
    return Counter((run.ran, predict_memory(run).verdict(run.cluster.gpu.memory)) for run in runs)


def wrong(found: Counter[tuple[bool, Verdict]]) -> int:
    """Return the number of runs that did what the verdict excludes."""
    return found[True, "does not fit"] + found[False, "fits"]


def print_verdicts(runs: Sequence[Run]) -> None:
    """Print which verdicts runs have that ran, and that were out of memory, and how many are wrong."""
    found = count_verdicts(runs)
    print(f"\n{'':13}" + "".join(f"{verdict:>14}" for verdict in VERDICTS))
    for ran, name in ((True, "ran"), (False, "out of memory")):
        print(f"{name:13}" + "".join(f"{found[ran, verdict]:14}" for verdict in VERDICTS))
    fits = sum(found[ran, "fits"] for ran in (True, False))
    tight = sum(found[ran, "tight"] for ran in (True, False))
    print(f"wrong: {_share(wrong(found), len(runs))}, of those that fit: {_share(found[False, 'fits'], fits)}")
    print(f"tight: {_share(tight, len(runs))}")


@dataclass(frozen=True, slots=True)
class Judged:
    """Prediction of a run: its program and source, the logarithm of its error, and its error without the program's."""

    program: str
    source: str
    error: float
    others: float

    @classmethod
    def of(cls, run: Run) -> "Judged":
        """Return the predicted run."""
        prediction, program = predict_run(run), run.software.name
        others = math.sqrt(prediction.error**2 - PROGRAMS[program] ** 2)
        return cls(program, run.source, math.log(prediction.seconds / (run.seconds or math.nan)), others)

    def holds(self, program_error: float) -> bool:
        """Return True if the interval holds with this error of the program."""
        return abs(self.error) <= math.log1p(QUANTILE * math.hypot(self.others, program_error))


def program_error(found: Sequence[Judged]) -> float:
    """Return the smallest error of a program with which 80 % of its intervals hold."""
    return next(error for error in np.arange(0, 10, 0.01) if sum(one.holds(error) for one in found) >= 0.8 * len(found))


def print_left_out(found: Sequence[Judged]) -> None:
    """Print the error of each program, and how often intervals hold for sources that were left out of the fit."""
    programs: Mapping[str, list[Judged]] = {name: [one for one in found if one.program == name] for name in PROGRAMS}
    for name, runs in programs.items():
        if runs:
            print(f"{name}: {len(runs)} rows, error {program_error(runs):.2f} (in use: {PROGRAMS[name]:.2f})")
    held = [one.holds(left_out_error(one, programs[one.program], found)) for one in found]
    print(f"intervals hold in {100 * sum(held) / len(held):.0f} % of the rows of sources that were left out")


def left_out_error(one: Judged, alike: Sequence[Judged], everyone: Sequence[Judged]) -> float:
    """Return the error of a program without the source of `one`; that of all programs if less than three are left."""
    rest = [other for other in alike if other.source != one.source]
    if len({other.source for other in rest}) < LEAST_SOURCES:
        rest = [other for other in everyone if other.source != one.source]
    return program_error(rest)


def predict_run(run: Run, constants: Constants | None = None) -> Prediction:
    """Return the prediction of a run, with the package's constants by default."""
    batch, constants = run.layout.batch, constants or Constants()
    job = Job(run.cluster, run.model, run.software, run.seq, batch, tokens=batch * run.seq, constants=constants)
    return job.predict(run.layout)


def predict_memory(run: Run) -> Memory:
    """Return the predicted memory of a run."""
    return Needs(run.cluster, run.model, run.software, run.seq, run.layout).fullest()


def fit(runs: Sequence[Run]) -> Constants:
    """Return the constants that fit published runs best."""

    def predicted(run: Run, constants: Constants) -> float:
        return predict_run(run, constants).seconds

    observed = [Observation(run.seconds or math.nan, NOISE, partial(predicted, run)) for run in runs]
    return fit_constants(observed, EXPECTED, ERRORS)


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


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / max(1, whole):.1f} %)"


def _percent(errors: Sequence[float], share: float) -> str:
    return f"{100 * np.quantile(np.abs(errors), share):.1f} %"


if __name__ == "__main__":
    sys.exit(main())
