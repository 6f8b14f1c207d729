#!/usr/bin/env python3
"""Race `adaptive` against fixed settings to a held-out loss on emulated hosts. Needs Linux and root.

All settings train the same model from the same weights on the same batches, under ZeRO 1 at a constant learning rate.
The goal is the held-out loss of the baseline after --steps steps. The others may train 1.4 times as long to reach it.
Seconds are those of training steps with the measurements of candidates, without the first step. The adaptive run is not
told the rate. Finished runs are kept and not repeated. The race takes about eight minutes on two idle cores; on a busy
machine the ratio says little.

examples, from the root of the repository:
  python -m launch.studies.race --data data/shakespeare --output-dir runs/race
  python -m launch.studies.race --data data/shakespeare --output-dir runs/race_1gbit --rate 1gbit
  python -m launch.studies.race --data data/shakespeare --output-dir runs/long_race --steps 300 --against int3+ternary
  python -m launch.studies.race --data data/shakespeare --output-dir runs/bits --hosts 4 --steps 90 \\
      --baseline none+none --against int8+int4 int4+int4 int2+int4 sign+int4
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION
from deepspeed_compress.config.numbers import shown
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.bench.hosts import Cluster, signals_as_exceptions
from deepspeed_compress.tools.run_directory import METRICS, SUMMARY
from deepspeed_compress.tools.tables import print_table
from deepspeed_compress.tools.time_to_loss import TimedRun, read_run, time_to
from launch.studies.harness import ROOT, add_run_options, add_text_options, new_parser, tracked

Section = Mapping[str, Any]
BASELINE, ADAPTIVE = "int4+int4", "adaptive"
GOAL = 1.03
"""Largest ratio of the adaptive run's time to that of the best fixed setting."""
LONGER = 1.4
"""Steps of the other settings per step of the baseline."""
FILE = ROOT / "configs" / "zero1_int4_weights.json"
TIMEOUT = 1800
"""Time limit of a run in seconds."""

INT8, INT4, INT2 = ({"method": "blockwise", "bits": bits} for bits in (8, 4, 2))
SMALL = {"block_size": 128, "scale_dtype": "bf16"}
INT3 = {"method": "blockwise", "bits": 3, **SMALL}
THREE, SIGN = ({"method": "sign", "levels": levels, **SMALL} for levels in (3, 2))
POWERSGD, NONE = {"method": "powersgd", "rank": 4}, {"method": "none"}
PAIRS: Mapping[str, tuple[Section, Section]] = {
    BASELINE: (INT4, INT4),
    "int3+ternary": (INT3, THREE),
    "int4+sign": (INT4, SIGN),
    "powersgd4+int4": (POWERSGD, INT4),
    "powersgd4+ternary": (POWERSGD, THREE),
    "none+none": (NONE, NONE),
    "int8+int4": (INT8, INT4),
    "int2+int4": (INT2, INT4),
    "sign+int4": ({"method": "sign"}, INT4),
    ADAPTIVE: (INT4, INT4),
}
"""Settings of gradients and weights. The adaptive run starts with those of `BASELINE`."""
USUAL = tuple(PAIRS)[1:5]
"""Settings that are raced by default, next to the baseline."""


def section_of(name: str) -> dict[str, Any]:
    """Return the section of a run. All compressed runs have balanced ownership and overlapped weights."""
    gradients, weights = PAIRS[name]
    if weights is NONE:
        return {"gradients": gradients}
    adaptive: dict[str, Any] = {"adaptive": {}} if name == ADAPTIVE else {}
    return {"gradients": gradients, "weights": {**weights, "overlap": True}, "ownership": "balanced", **adaptive}


def main(argv: Sequence[str] | None = None) -> int:
    """Train the missing runs and print the table."""
    options = parse_options(argv)
    names = [name for name in PAIRS if name in {options.baseline, ADAPTIVE, *options.against}]
    runs = {name: options.output_dir / name for name in names}
    with signals_as_exceptions():
        for name in tracked([name for name, run in runs.items() if not (run / SUMMARY).is_file()]):
            train_on_hosts(options, name, runs[name])
    timed = {name: read_run(run) for name, run in runs.items()}
    report(options.rate, timed, options.baseline, options.output_dir / "race.json")
    return 0


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_text_options(parser)
    add_run_options(parser, 80)
    parser.add_argument("--config", type=Path, default=FILE, help="base configuration (default: %(default)s)")
    parser.add_argument("--rate", default="100mbit", help="rate of the links (default: %(default)s)")
    parser.add_argument("--hosts", type=positive_integer, default=2, help="(default: %(default)s)")
    fixed = [name for name in PAIRS if name != ADAPTIVE]
    what = "setting whose loss is the goal (default: %(default)s)"
    parser.add_argument("--baseline", choices=fixed, default=BASELINE, metavar="SETTING", help=what)
    what = f"other settings, of {', '.join(fixed)} (default: {' '.join(USUAL)})"
    parser.add_argument("--against", nargs="+", choices=fixed, default=USUAL, metavar="SETTING", help=what)
    return parser.parse_args(argv)


def train_on_hosts(options: argparse.Namespace, name: str, run: Path) -> None:
    """Train on emulated hosts at a constant learning rate after a warm-up.

    Raises:
        SystemExit: A rank failed.
    """
    ds_config = json.loads(options.config.read_text())
    schedule = {"warmup_max_lr": ds_config["optimizer"]["params"]["lr"], "warmup_num_steps": options.steps // 10}
    ds_config["scheduler"] = {"type": "WarmupLR", "params": {**schedule, "warmup_type": "linear"}}
    ds_config[SECTION] = {**section_of(name), "monitor": {"path": str(run), "every": 10}}
    run.mkdir(parents=True, exist_ok=True)
    (run / METRICS).unlink(missing_ok=True)
    write_json(run / "given.json", ds_config)
    steps = options.steps if name == options.baseline else round(options.steps * LONGER)
    arguments = ["--deepspeed_config", run / "given.json", "--model", options.model, "--output-dir", run]
    arguments += ["--data", *options.data, "--tokenizer", options.output_dir / "tokenizer"]
    arguments += ["--seq-len", options.seq_len, "--steps", steps]
    arguments += ["--eval-every", 10, "--eval-batches", 4, "--log-every", 1]
    with Cluster(options.hosts, options.rate) as cluster:
        command = [sys.executable, str(ROOT / "launch" / "train_gpt.py"), *map(str, arguments)]
        done = cluster.run(command, timeout=TIMEOUT)
    if done.failure is not None:
        raise SystemExit(f"{run}: {done.failure}\n{done.outputs[0][-2000:]}")


def report(rate: str, runs: Mapping[str, TimedRun], baseline: str, file: Path) -> float | None:
    """Print the table and write `file`.

    Returns:
        The ratio of the adaptive run's time to that of the best fixed setting, or None if it does not reach the goal.
    """
    goal = runs[baseline].points[-1][1]
    times = {name: time_to(goal, run.points) for name, run in runs.items()}
    reached = {name: seconds for name, seconds in times.items() if seconds is not None and name != ADAPTIVE}
    best = min(reached, key=reached.__getitem__)
    ratios = {name: None if seconds is None else seconds / reached[best] for name, seconds in times.items()}
    rows = [
        (
            name,
            f"{run.points[-1][1]:.4f}",
            f"{run.step_seconds:.3f}",
            shown(times[name], ".1f"),
            shown(ratios[name], ".2f"),
        )
        for name, run in runs.items()
    ]
    columns = ("settings", "last loss", "seconds per step", "seconds to the goal", "of the best fixed")
    print_table(f"{rate}: to a held-out loss of {goal:.4f}", columns, rows, ("settings",))
    ratio = ratios[ADAPTIVE]
    verdict = "met" if ratio is not None and ratio <= GOAL else "missed"
    took = "did not reach the loss" if ratio is None else f"took {ratio:.3f} of the time of {best}"
    print(f"adaptive {took} (goal: {GOAL}; {verdict})")
    write_json(file, {"loss": goal, "seconds": times, "best": best, "ratio": ratio, "goal": GOAL})
    return ratio


if __name__ == "__main__":
    sys.exit(main())
