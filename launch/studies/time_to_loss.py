#!/usr/bin/env python3
"""Compute how long this package and its peers take to a loss: steps to the loss, times the step time on a network.

Losses do not depend on the network, and step times do not depend on the loss. So every setting is trained once per
seed on this machine, without a slow network, until its held-out loss and its smoothed training loss (the mean of 50
batches) reach those of DDP after --steps steps. `ds-compress bench step` measures the step times. All settings have the
same text, seeds and batches, and AdamW, or the optimizer of their file, at a constant rate after 20 steps, so that
every point of a curve shows the best loss that the run can have by then.

PowerSGD and post-local SGD start after a tenth of the steps, as PyTorch recommends. Earlier steps are timed as steps of
DDP, and the warm-up of a file as steps of DeepSpeed. The losses of DDP also stand for DeepSpeed and FSDP2, which only
round differently. An `adaptive` file needs a network to choose by: name the file of its choice instead, or train it on
emulated hosts with compare_runs.

Finished runs are kept and not repeated, and the tables and pictures show all of them.

examples, from the root of the repository:
  python -m launch.studies.time_to_loss --data data/shakespeare --output-dir runs/time_to_loss --hosts 4
  python -m launch.studies.time_to_loss --data data/shakespeare --output-dir runs/time_to_loss --hosts 4 2 \\
      --only 'ddp$|powersgd4|int4' --seeds 0 1 2
  python -m launch.studies.time_to_loss --data data/shakespeare --output-dir runs/tokens --hosts 2 --steps 100 \\
      --micro-batch 16 --seq-len 256
  ds-compress bench step --config configs/zero0_int4.json --peers ddp ddp-powersgd4 --output runs/steps.json \\
      --emulate 4,none,1gbit,100mbit
  python -m launch.studies.time_to_loss --data data/shakespeare --output-dir runs/time_to_loss --hosts 4 --train-none \\
      --times runs/steps.json
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from deepspeed_compress.config import SECTION, parse_section, read_ds_config
from deepspeed_compress.errors import CompressError, ConfigError, DataError
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.bench.jobs import read_document
from deepspeed_compress.tools.bench.workload import Contender, Workload, group_contenders
from launch.studies.loss_curve import Curve, Goal, Job, finished, run_job
from launch.studies.text import cache_dir, prepare_data
from launch.studies.time_table import BASELINE, StepTimes, Trained, goal_of, report

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "configs" / "zero0_int4.json"
"""Configuration with the optimizer and the clipping of the peers."""
PEERS = (
    BASELINE,
    "ddp-bf16",
    *(f"ddp-powersgd{rank}" for rank in (1, 2, 4, 8)),
    *(f"ddp-post-local{steps}" for steps in (4, 8)),
)
FSDP2 = ("fsdp2", "fsdp2-int4", "fsdp2-int4-weights")
"""FSDP2 uncompressed and compressed, which are trained on request."""
OURS = (
    *(ROOT / "configs" / f"{name}.json" for name in ("zero0_int4", "zero1_int4_weights", "zero1_wan")),
    *sorted((ROOT / "configs").glob("*_overlap.json")),
    *(ROOT / "configs" / f"{name}.json" for name in ("islands4_streamed", "islands20_moments")),
    *sorted((Path(__file__).parent / "configs").glob("*.json")),
)
RATE_WARMUP_STEPS, START, WINDOW, EVAL_TOKENS = 20, 0.1, 50, 16384
"""`START` is the share of dense steps of late methods; `WINDOW` is the number of averaged training losses."""
CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 if a run failed, or 2 if an option is wrong."""
    options = _options(argv)
    os.environ |= CPU
    try:
        study = Study(options, prepare_data(options))
        failures = 0 if options.train_none else study.train_missing()
        times = StepTimes([read_document(file) for file in options.times])
        report(study.trained(), study.window, times, options.output_dir)
    except CompressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(failures > 0)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.studies.time_to_loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text files or directories")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory for curves, tables and pictures")
    ours = "configurations of this package (default: 4-bit gradients, also weights, overlapped, wan, islands)"
    parser.add_argument("--configs", type=Path, nargs="*", default=OURS, metavar="FILE", help=ours)
    parser.add_argument("--peers", nargs="*", choices=(*PEERS, *FSDP2), default=PEERS, metavar="PEER")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="settings to train")
    parser.add_argument("--train-none", action="store_true", help="only write tables and pictures of finished runs")
    times = "files of `bench step --output` with the step times"
    parser.add_argument("--times", type=Path, nargs="*", default=(), metavar="FILE.json", help=times)
    parser.add_argument("--model", type=Path, default=Path("configs/models/gpt_10m.json"))
    parser.add_argument("--hosts", type=positive_integer, nargs="+", default=[4, 2], help="(default: 4, then 2)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=positive_integer, default=300, help="steps of DDP to the goal (default: 300)")
    longest = "largest number of steps of the others (default: twice --steps)"
    parser.add_argument("--longest", type=positive_integer, metavar="STEPS", help=longest)
    parser.add_argument("--eval-every", type=positive_integer, default=20, metavar="STEPS")
    parser.add_argument("--seq-len", type=positive_integer, default=64)
    batch = "sequences in a micro-batch (default: as in the file)"
    parser.add_argument("--micro-batch", type=positive_integer, metavar="N", help=batch)
    options = parser.parse_args(argv)
    options.longest = options.longest or 2 * options.steps
    return options


@dataclass(frozen=True)
class Run:
    """Setting on a number of hosts with one seed."""

    hosts: int
    seed: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}, {self.hosts} hosts, seed {self.seed}"


class Study:
    """Runs of the options on the tokens of the key `data`."""

    def __init__(self, options: argparse.Namespace, data: str) -> None:
        self.options, self.data = options, data
        self.files = {file.stem: file for file in options.configs}
        self.window = min(WINDOW, options.steps)
        self.names = tuple(dict.fromkeys((BASELINE, *options.peers, *self.files)))

    def train_missing(self) -> int:
        """Train the missing runs, DDP first, which sets the goal of the others. Return the number of failures."""
        names = [name for name in self.names if name == BASELINE or self.options.only.search(name)]
        runs = [Run(*run) for run in product(self.options.hosts, self.options.seeds, names)]
        failed = [run for run in track(runs, "runs", console=Console(stderr=True)) if not self._train(run)]
        for run in failed:
            print(f"{run}: failed, see {self._file(run).with_suffix('.log')}", file=sys.stderr)
        return len(failed)

    def trained(self) -> list[Trained]:
        """Return the finished runs, DDP first."""
        runs = [Run(*run) for run in product(self.options.hosts, self.options.seeds, self.names)]
        found = ((run, self._curve(run)) for run in runs)
        return [Trained(run.name, run.hosts, run.seed, curve) for run, curve in found if curve is not None]

    def _file(self, run: Run) -> Path:
        path: Path = self.options.output_dir / f"{run.hosts}hosts" / f"seed{run.seed}" / f"{run.name}.json"
        return path

    def _job(self, run: Run, goal: Goal | None) -> Job:
        options, file = self.options, self.files.get(run.name, NATIVE)
        workload = self._workload(run, file)
        ds_config = trained_as(file, run.seed) | {"train_micro_batch_size_per_gpu": workload.micro_batch}
        batch_tokens = workload.micro_batch * workload.accumulation * run.hosts * options.seq_len
        return Job(
            workload=workload,
            contender=Contender(run.name, run.name, ds_config if run.name in self.files else None),
            native={key: ds_config[key] for key in ("optimizer", "scheduler")},
            start=round(START * options.steps),
            steps=options.steps if run.name == BASELINE else options.longest,
            eval_every=options.eval_every,
            eval_batches=max(1, EVAL_TOKENS // batch_tokens),
            window=self.window,
            data=self.data,
            goal=goal,
        )

    def _workload(self, run: Run, file: Path) -> Workload:
        """Return the common workload of all settings. DeepSpeed clips as `file` says, because Muon must not be clipped.

        Raises:
            ConfigError: `file` has another batch, precision or layout.
        """
        sizes = {"micro_batch": self.options.micro_batch, "seq_len": self.options.seq_len, "seed": run.seed}
        groups = group_contenders([str(NATIVE), str(file)], str(self.options.model), (), sizes, run.hosts)
        common = groups[0].workload
        if any(replace(group.workload, clipping=common.clipping) != common for group in groups):
            raise ConfigError(f"{file}: batch, precision or layout differ from {NATIVE}; use the same ones")
        return common

    def _goal(self, run: Run) -> Goal | None:
        """Return the last losses of DDP, or None for DDP itself."""
        if run.name == BASELINE:
            return None
        curve = self._curve(replace(run, name=BASELINE))
        if curve is None:
            raise DataError(f"{run}: {BASELINE}, which sets the goal, is not trained yet; train it first")
        return goal_of(curve, self.window)

    def _curve(self, run: Run) -> Curve | None:
        """Return the curve of a finished run, or None. Raises DataError if it was made with other options."""
        return finished(self._job(run, self._goal(run)), self._file(run)) if self._file(run).is_file() else None

    def _train(self, run: Run) -> bool:
        """Train the run unless it is finished. Return True on success."""
        if self._curve(run) is not None:
            return True
        file = self._file(run)
        print(f"{run}: {file.with_suffix('.log')}", flush=True)
        return run_job(self._job(run, self._goal(run)), run.hosts, cache_dir(self.options), file)


def trained_as(file: Path, seed: int) -> dict[str, Any]:
    """Return the configuration with the study's schedule and seed.

    Raises:
        ConfigError: The configuration is adaptive, and chooses by the network.
    """
    ds_config = read_ds_config(str(file))
    if parse_section(ds_config).adaptive is not None:
        raise ConfigError(
            f"{file}: /{SECTION}/adaptive chooses by the network, and there is none; write the settings that it chooses"
        )
    # A cosine from 1 to 1 is constant, and unlike WarmupLR it keeps the learning rate of each parameter group.
    params = {"total_num_steps": 2 * RATE_WARMUP_STEPS, "warmup_num_steps": RATE_WARMUP_STEPS, "cos_min_ratio": 1.0}
    schedule = {"type": "WarmupCosineLR", "params": params | {"warmup_type": "linear"}}
    section = ds_config[SECTION] | {"seed": seed, "monitor": {"every": 1000}}
    return ds_config | {"scheduler": schedule, SECTION: section}


if __name__ == "__main__":
    sys.exit(main())
