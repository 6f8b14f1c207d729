#!/usr/bin/env python3
"""Compare compression settings on one model, with everything else equal.

loss   held-out losses with several seeds, on this machine
time   time to a given loss on emulated hosts, with fixed and adaptive settings; needs Linux and root

The time is that of all training steps except the first. Held-out losses are interpolated between evaluations. The goal
is the last held-out loss of the uncompressed run at the same rate. The others may train a third longer to reach it, at
a constant learning rate. Finished runs are kept and not repeated, and the tables show all finished runs.

examples, from the root of the repository:
  python -m launch.studies.compare_runs loss --data data/shakespeare --output-dir runs/methods
  python -m launch.studies.compare_runs loss --data data/shakespeare --output-dir runs/few --settings none int4 \\
      --seeds 0
  python -m launch.studies.compare_runs time --data data/shakespeare --output-dir runs/time_to_loss
  python -m launch.studies.compare_runs time --data data/shakespeare --output-dir runs/fast --rates 1gbit \\
      --settings none adaptive
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from deepspeed_compress.config import SECTION
from deepspeed_compress.config.numbers import change, shown
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.bench.hosts import Cluster, signals_as_exceptions
from deepspeed_compress.tools.run_directory import METRICS, SUMMARY, read_statistics, read_summary
from deepspeed_compress.tools.time_to_loss import TimedRun, read_run, time_to

Section = Mapping[str, Any]
BASELINE, ADAPTIVE = "none", "adaptive"
ROOT = Path(__file__).parents[2]

INT4 = {"method": "blockwise", "bits": 4}
TOP_K = {"method": "topk", "density": 0.01, "values": INT4}
OF_LOSS: Mapping[str, Section] = {
    BASELINE: {"gradients": {"method": "none"}},
    "int8": {"gradients": {"method": "blockwise", "bits": 8}},
    "int4": {"gradients": INT4},
    "topk1_int4": {"gradients": TOP_K},
    "topk1_int4_warmup": {"gradients": TOP_K, "schedule": {"warmup_steps": 60}},
}
"""Settings for `loss`, which overwrite keys of the file's section."""
GRADIENTS: Mapping[str, Section] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4},
    "int2": {"bits": 2},
    "sign": {"method": "sign"},
    "topk10": {"method": "topk", "density": 0.1, "values": INT4},
    "topk1": TOP_K,
    "powersgd4": {"method": "powersgd", "rank": 4},
}
OF_TIME: Mapping[str, Section] = {
    BASELINE: {"gradients": {"method": "none"}},
    **{name: {"gradients": gradients, "weights": INT4} for name, gradients in GRADIENTS.items()},
    "wan": {},
    ADAPTIVE: {"gradients": {"bits": 8}, "weights": INT4, "adaptive": {"probe_every": 50}},
}
"""Sections for `time`. An empty one stands for the section of the file."""
FILES = {"wan": Path("configs/zero1_wan.json")}
"""Settings that need their own optimizer."""
LONGER = 4 / 3
"""Steps of the other settings per step of the baseline."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen study."""
    options = _options(argv)
    with signals_as_exceptions():
        options.study(options)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    studies = parser.add_subparsers(required=True, metavar="STUDY")
    loss, time = studies.add_parser("loss", help="held-out losses"), studies.add_parser("time", help="time to a loss")
    loss.set_defaults(study=compare_losses)
    time.set_defaults(study=compare_times)
    for study, settings in ((loss, OF_LOSS), (time, OF_TIME)):
        study.add_argument("--data", type=Path, nargs="+", required=True, help="text files or directories")
        study.add_argument("--output-dir", type=Path, required=True, help="directory for the runs")
        study.add_argument("--model", type=Path, default=Path("configs/models/gpt_10m.json"))
        study.add_argument("--settings", nargs="+", choices=settings, default=list(settings))
        study.add_argument("--seq-len", type=int, default=64)
    loss.add_argument("--config", type=Path, default=Path("configs/zero2_none.json"), help="base configuration")
    loss.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    loss.add_argument("--ranks", type=int, default=2)
    loss.add_argument("--steps", type=int, default=600)
    file = Path("configs/zero1_int4_weights.json")
    time.add_argument("--config", type=Path, default=file, help="base configuration")
    time.add_argument(
        "--rates", nargs="+", default=["1gbit", "100mbit"], help="rates of the links (default: 1gbit 100mbit)"
    )
    time.add_argument("--hosts", type=int, default=4)
    time.add_argument("--steps", type=int, default=90, help="steps of the uncompressed run (default: 90)")
    return parser.parse_args(argv)


def _command(options: argparse.Namespace, ds_config: Mapping[str, Any], run: Path, *more: object) -> list[str]:
    """Return the command of a training run, after writing its configuration into the directory `run`."""
    run.mkdir(parents=True, exist_ok=True)
    (run / METRICS).unlink(missing_ok=True)
    write_json(run / "given.json", ds_config)
    arguments = ["--deepspeed_config", run / "given.json", "--model", options.model, "--output-dir", run]
    arguments += ["--data", *options.data, "--tokenizer", options.output_dir / "tokenizer"]
    arguments += ["--seq-len", options.seq_len, "--sample-tokens", 0, *more]
    return [str(ROOT / "launch" / "train_gpt.py"), *map(str, arguments)]


def missing(runs: Mapping[Any, Path]) -> Iterator[tuple[Any, Path]]:
    """Yield the unfinished runs, with a progress bar."""
    left = {key: run for key, run in runs.items() if not (run / SUMMARY).is_file()}
    yield from track(left.items(), "runs", console=Console(stderr=True))


def compare_losses(options: argparse.Namespace) -> None:
    """Train the missing runs and print the table."""
    runs = {
        (name, seed): options.output_dir / name / f"seed{seed}" for seed in options.seeds for name in options.settings
    }
    for (name, seed), run in missing(runs):
        _train_here(options, name, seed, run)
    _print_losses(options)


def _train_here(options: argparse.Namespace, name: str, seed: int, run: Path) -> None:
    ds_config = json.loads(options.config.read_text())
    ds_config["scheduler"]["params"]["total_num_steps"] = options.steps
    ds_config[SECTION] |= {**OF_LOSS[name], "seed": seed}
    more = ("--steps", options.steps, "--seed", seed, "--eval-every", 300, "--eval-batches", 64)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
    cpu = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([*launcher, *_command(options, ds_config, run, *more)], env=os.environ | cpu, check=False)
    if done.returncode:
        raise SystemExit(f"{run}: the ranks failed with exit code {done.returncode}")


def _print_losses(options: argparse.Namespace) -> None:
    table = Table(title=f"held-out loss after {options.steps} steps, {options.ranks} ranks")
    for column in ("settings", "seed", "loss", "against none", "bytes sent per step", "ratio"):
        table.add_column(column, justify="left" if column == "settings" else "right")
    for name in options.settings:
        gaps = []
        for seed in options.seeds:
            loss, base = (_loss(options.output_dir / one / f"seed{seed}") for one in (name, BASELINE))
            gaps.append(loss / base - 1)
            sent, ratio = traffic(options.output_dir / name / f"seed{seed}")
            table.add_row(name, str(seed), f"{loss:.4f}", change(gaps[-1]), f"{sent:,.0f}", shown(ratio, ".1f"))
        table.add_row(name, "mean", "", change(statistics.fmean(gaps)), "", "", end_section=True)
    Console(width=100).print(table)


def _loss(run: Path) -> float:
    """Return the held-out loss of a run, or NaN if it is not finished."""
    return float(read_summary(run)["eval_loss"]) if (run / SUMMARY).is_file() else math.nan


def traffic(run: Path) -> tuple[float, float]:
    """Return the mean gradient bytes that a rank sends per step, and the ratio of uncompressed bytes to them."""
    lines = read_statistics(run)
    sent = statistics.fmean(line["bytes_sent"] for line in lines)
    return sent, statistics.fmean(line["bytes_uncompressed"] for line in lines) / sent


def compare_times(options: argparse.Namespace) -> None:
    """Train the missing runs and print a table for each rate."""
    runs = {(rate, name): options.output_dir / rate / name for rate in options.rates for name in options.settings}
    for (rate, name), run in missing(runs):
        ds_config = json.loads(FILES.get(name, options.config).read_text())
        ds_config[SECTION] = OF_TIME[name] or ds_config[SECTION]
        steps = options.steps if name == BASELINE else round(options.steps * LONGER)
        train_on_hosts(options, rate, ds_config, steps, run)
    for rate in options.rates:
        timed = {name: read_run(runs[rate, name]) for name in options.settings}
        print_times(rate, timed, timed[BASELINE].points[-1][1])


def train_on_hosts(options: argparse.Namespace, rate: str, ds_config: dict[str, Any], steps: int, run: Path) -> None:
    """Train on emulated hosts at a constant learning rate after a warm-up.

    Raises:
        SystemExit: A rank failed.
    """
    schedule = {"warmup_max_lr": ds_config["optimizer"]["params"]["lr"], "warmup_num_steps": options.steps // 10}
    ds_config["scheduler"] = {"type": "WarmupLR", "params": {**schedule, "warmup_type": "linear"}}
    ds_config[SECTION] = {**ds_config[SECTION], "monitor": {"path": str(run), "every": 10}}
    more = ("--steps", steps, "--eval-every", 10, "--eval-batches", 4, "--log-every", 1)
    with Cluster(options.hosts, rate) as cluster:
        done = cluster.run([sys.executable, *_command(options, ds_config, run, *more)], timeout=1800)
    if done.failure is not None:
        raise SystemExit(f"{run}: {done.failure}\n{done.outputs[0][-2000:]}")


def print_times(rate: str, runs: Mapping[str, TimedRun], goal: float) -> None:
    """Print the times to a held-out loss of `goal` on links of `rate`."""
    times = {name: time_to(goal, run.points) for name, run in runs.items()}
    best = min(seconds for name, seconds in times.items() if seconds is not None and name != ADAPTIVE)
    table = Table(title=f"{rate}: to a held-out loss of {goal:.4f}", title_justify="left")
    for title in ("settings", "last loss", "seconds per step", "seconds to the goal", "of the best fixed"):
        table.add_column(title, justify="left" if title == "settings" else "right")
    for name, run in runs.items():
        seconds = times[name]
        cells = ("not reached", "") if seconds is None else (f"{seconds:.1f}", f"{seconds / best:.2f}")
        table.add_row(name, f"{run.points[-1][1]:.4f}", f"{run.step_seconds:.3f}", *cells)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
