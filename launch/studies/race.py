#!/usr/bin/env python3
"""Race `adaptive` against fixed settings to a held-out loss on emulated hosts. Needs Linux and root.

All settings train the same model from the same weights on the same batches, under ZeRO 1 at a constant learning rate.
The goal is the held-out loss of 4-bit gradients and weights after --steps steps. The others may train 1.4 times as long
to reach it. Seconds are those of training steps with the measurements of candidates, without the first step. The
adaptive run is not told the rate. Finished runs are kept and not repeated. The race takes about eight minutes on two
idle cores; on a busy machine the ratio says little.

examples, from the root of the repository:
  python -m launch.studies.race --data data/shakespeare --output-dir runs/race
  python -m launch.studies.race --data data/shakespeare --output-dir runs/race_1gbit --rate 1gbit
  python -m launch.studies.race --data data/shakespeare --output-dir runs/long_race --steps 300 --against int3+ternary
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.bench.hosts import signals_as_exceptions
from deepspeed_compress.tools.time_to_loss import TimedRun, read_run, time_to
from launch.studies.compare_runs import ADAPTIVE, missing, print_times, train_on_hosts

Section = Mapping[str, Any]
BASELINE = "int4+int4"
GOAL = 1.03
"""Largest ratio of the adaptive run's time to that of the best fixed setting."""
LONGER = 1.4
"""Steps of the other settings per step of the baseline."""
FILE = Path("configs/zero1_int4_weights.json")

INT4, SMALL = {"method": "blockwise", "bits": 4}, {"block_size": 128, "scale_dtype": "bf16"}
INT3 = {"method": "blockwise", "bits": 3, **SMALL}
THREE, SIGN = ({"method": "sign", "levels": levels, **SMALL} for levels in (3, 2))
POWERSGD = {"method": "powersgd", "rank": 4}
PAIRS: Mapping[str, tuple[Section, Section]] = {
    BASELINE: (INT4, INT4),
    "int3+ternary": (INT3, THREE),
    "int4+sign": (INT4, SIGN),
    "powersgd4+int4": (POWERSGD, INT4),
    "powersgd4+ternary": (POWERSGD, THREE),
    ADAPTIVE: (INT4, INT4),
}
"""Settings of gradients and weights. The adaptive run starts with those of the baseline."""


def section_of(name: str) -> dict[str, Any]:
    """Return the section of a run. All runs have balanced ownership and overlapped weights."""
    gradients, weights = PAIRS[name]
    adaptive: dict[str, Any] = {"adaptive": {}} if name == ADAPTIVE else {}
    return {"gradients": gradients, "weights": {**weights, "overlap": True}, "ownership": "balanced", **adaptive}


def main(argv: Sequence[str] | None = None) -> int:
    """Train the missing runs and print the table."""
    options = _options(argv)
    runs = {name: options.output_dir / name for name in options.only}
    with signals_as_exceptions():
        for name, run in missing(runs):
            ds_config = json.loads(options.config.read_text()) | {SECTION: section_of(name)}
            steps = options.steps if name == BASELINE else round(options.steps * LONGER)
            train_on_hosts(options, options.rate, ds_config, steps, run)
    report(options.rate, {name: read_run(run) for name, run in runs.items()}, options.output_dir / "race.json")
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.studies.race",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text files or directories")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory for the runs")
    parser.add_argument("--model", type=Path, default=Path("configs/models/gpt_10m.json"))
    parser.add_argument("--config", type=Path, default=FILE, help="base configuration (default: %(default)s)")
    parser.add_argument("--rate", default="100mbit", help="rate of the links (default: %(default)s)")
    parser.add_argument("--hosts", type=positive_integer, default=2, help="(default: %(default)s)")
    parser.add_argument(
        "--steps", type=positive_integer, default=80, help="steps of the baseline (default: %(default)s)"
    )
    parser.add_argument("--seq-len", type=positive_integer, default=64)
    others = sorted(PAIRS.keys() - {BASELINE, ADAPTIVE})
    parser.add_argument(
        "--against", nargs="+", choices=others, default=others, help=f"settings besides {BASELINE} (default: all)"
    )
    options = parser.parse_args(argv)
    options.only = [name for name in PAIRS if name in {BASELINE, ADAPTIVE, *options.against}]
    return options


def report(rate: str, runs: Mapping[str, TimedRun], file: Path) -> float | None:
    """Print the table and write `file`.

    Returns:
        The ratio of the adaptive run's time to that of the best fixed setting, or None if it does not reach the goal.
    """
    goal = runs[BASELINE].points[-1][1]
    times = {name: time_to(goal, run.points) for name, run in runs.items()}
    reached = {name: seconds for name, seconds in times.items() if seconds is not None and name != ADAPTIVE}
    best, seconds = min(reached, key=reached.__getitem__), times[ADAPTIVE]
    ratio = None if seconds is None else seconds / reached[best]
    print_times(rate, runs, goal)
    verdict = "met" if ratio is not None and ratio <= GOAL else "missed"
    took = "did not reach the loss" if ratio is None else f"took {ratio:.3f} of the time of {best}"
    print(f"adaptive {took} (goal: {GOAL}; {verdict})")
    write_json(file, {"loss": goal, "seconds": times, "best": best, "ratio": ratio, "goal": GOAL})
    return ratio


if __name__ == "__main__":
    sys.exit(main())
