#!/usr/bin/env python3
"""Train one model on emulated hosts with fixed settings and with adaptive ones, and compare the time to a given loss.

Time is that of training steps, the first left out; held-out losses are interpolated between evaluations. The goal is
the last held-out loss of the uncompressed run at the same rate; the others train a third longer, at a constant learning
rate, so that they may reach it later. Finished runs are kept and not repeated. Needs Linux and root.

examples:
  python launch/time_to_loss.py --data data/shakespeare --output-dir runs/time_to_loss
  python launch/time_to_loss.py --data data/shakespeare --output-dir runs/fast --rates 1gbit --settings none adaptive
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from deepspeed_compress.tools.bench.hosts import Cluster, signals_as_exceptions
from deepspeed_compress.tools.run_directory import METRICS
from deepspeed_compress.tools.time_to_loss import read_run, time_to

VALUES = {"method": "blockwise", "bits": 4}
GRADIENTS: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4},
    "int2": {"bits": 2},
    "sign": {"method": "sign"},
    "topk10": {"method": "topk", "density": 0.1, "values": VALUES},
    "topk1": {"method": "topk", "density": 0.01, "values": VALUES},
    "powersgd4": {"method": "powersgd", "rank": 4},
}
WEIGHTS = {"method": "blockwise", "bits": 4}
SECTIONS: Mapping[str, dict[str, Any]] = {
    "none": {"gradients": {"method": "none"}},
    **{name: {"gradients": gradients, "weights": WEIGHTS} for name, gradients in GRADIENTS.items()},
    "wan": {},
    "adaptive": {"gradients": {"bits": 8}, "weights": WEIGHTS, "adaptive": {"probe_every": 50}},
}
"""Sections of the configuration; an empty one is what the file says."""
FILES = {"wan": Path("configs/zero1_wan.json")}
"""Settings that need an optimizer of their own."""
REFERENCE = "none"
"""Its last held-out loss is the goal."""
LONGER = 4 / 3
"""Steps of the others, against the reference's."""


def main() -> int:
    options = _options()
    runs = [(rate, name) for rate in options.rates for name in options.settings]
    with signals_as_exceptions(), Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("runs", total=len(runs))
        for rate, name in runs:
            progress.update(task, description=f"{rate}, {name}")
            directory = options.output_dir / rate / name
            if not (directory / "summary.json").is_file():
                _train(options, rate, name, directory)
            progress.advance(task)
    for rate in options.rates:
        _show(rate, {name: options.output_dir / rate / name for name in options.settings})
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a directory of text files")
    parser.add_argument("--output-dir", type=Path, required=True, help="a directory a rate and setting is made here")
    parser.add_argument(
        "--config", type=Path, default=Path("configs/zero1_int4_weights.json"), help="all but the section"
    )
    parser.add_argument("--model", default="configs/models/gpt_10m.json")
    parser.add_argument("--settings", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"], help="of every link (default: both)")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=90, help="of the uncompressed run (default: 90)")
    parser.add_argument("--seq-len", type=int, default=64)
    return parser.parse_args()


def _train(options: argparse.Namespace, rate: str, name: str, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    ds_config = json.loads(FILES.get(name, options.config).read_text())
    schedule = {"warmup_max_lr": ds_config["optimizer"]["params"]["lr"], "warmup_num_steps": options.steps // 10}
    ds_config["scheduler"] = {"type": "WarmupLR", "params": {**schedule, "warmup_type": "linear"}}
    section = SECTIONS[name] or ds_config["deepspeed_compress"]
    ds_config["deepspeed_compress"] = {**section, "monitor": {"path": str(directory), "every": 10}}
    file = directory / "given.json"
    file.write_text(json.dumps(ds_config, indent=2))
    (directory / METRICS).unlink(missing_ok=True)
    steps = options.steps if name == REFERENCE else round(options.steps * LONGER)
    command = [sys.executable, "launch/train_gpt.py", "--deepspeed_config", str(file), "--data", options.data]
    command += ["--model", options.model, "--tokenizer", str(options.output_dir / "tokenizer")]
    command += ["--output-dir", str(directory), "--steps", str(steps), "--seq-len", str(options.seq_len)]
    command += ["--eval-every", "10", "--eval-batches", "4", "--log-every", "1", "--sample-tokens", "0"]
    with Cluster(options.hosts, rate) as cluster:
        run = cluster.run(command, timeout=1800)
    if run.failure is not None:
        raise SystemExit(f"{directory}: {run.failure}\n{run.outputs[0][-2000:]}")


def _show(rate: str, directories: Mapping[str, Path]) -> None:
    runs = {name: read_run(directory) for name, directory in directories.items()}
    goal = runs[REFERENCE].points[-1][1]
    times = {name: time_to(goal, run.points) for name, run in runs.items()}
    best = min(seconds for name, seconds in times.items() if seconds is not None and name != "adaptive")
    table = Table(title=f"{rate}: to a held-out loss of {goal:.4f}", title_justify="left")
    for title in ("settings", "last loss", "seconds a step", "seconds to the goal", "of the best fixed"):
        table.add_column(title, justify="left" if title == "settings" else "right")
    for name, run in runs.items():
        seconds = times[name]
        cells = ("not reached", "") if seconds is None else (f"{seconds:.1f}", f"{seconds / best:.2f}")
        table.add_row(name, f"{run.points[-1][1]:.4f}", f"{run.step_seconds:.3f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
