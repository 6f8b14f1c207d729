#!/usr/bin/env python3
"""Compute how long this package and its peers take to a loss: steps to the loss, times the step time on a network.

Losses do not depend on the network, and step times do not depend on the loss. So every setting is trained once per
seed on this machine, without a slow network, until its held-out loss and its smoothed training loss (the mean of 50
batches) reach those of DDP after --steps steps. `ds-compress bench step` measures the step times. All settings have the
same text, seeds and batches, and AdamW, or the optimizer of their file, at a constant rate after 20 steps, so that
every point of a curve shows the best loss that the run can have by then.

PowerSGD starts after a tenth of the steps, as PyTorch recommends. Earlier steps are timed as steps of
DDP, and the warm-up of a file as steps of DeepSpeed. The losses of DDP also stand for DeepSpeed and FSDP2, which only
round differently. An `adaptive` file needs a network to choose by: name the file of its choice instead, or train it on
emulated hosts with race.

Finished runs are kept and not repeated, and the tables show all of them.

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
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from deepspeed_compress.errors import ConfigError, DataError
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.bench.workload import Contender, Workload, group_contenders
from launch.studies.harness import (
    ROOT,
    add_run_options,
    add_text_options,
    new_parser,
    prepare_data,
    run_study,
    tracked,
)
from launch.studies.loss_curve import EVAL_TOKENS, WINDOW, Goal, Job, Run, trained_as
from launch.studies.time_table import BASELINE, StepTimes, Trained, goal_of, report

NATIVE = ROOT / "configs" / "zero0_int4.json"
"""Configuration with the optimizer and the clipping of the peers."""
PEERS = (BASELINE, "ddp-powersgd1", "ddp-powersgd4")
FSDP2 = ("fsdp2", "fsdp2-int4", "fsdp2-int4-weights")
"""FSDP2 uncompressed and compressed, which are trained on request."""
OURS = (
    *(ROOT / "configs" / f"{name}.json" for name in ("zero0_int4", "zero1_int4_weights", "zero1_wan")),
    *sorted((ROOT / "configs").glob("*_overlap.json")),
    *(ROOT / "configs" / f"{name}.json" for name in ("islands4_streamed", "islands20_moments")),
    *sorted((Path(__file__).parent / "configs").glob("*.json")),
)
START = 0.1
"""Share of dense steps of late methods."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train the missing runs, write tables, and return the exit status."""
    return run_study(study, parse_options(argv))


def study(options: argparse.Namespace) -> bool:
    """Train the missing runs, and write tables of all. Return True if none has failed."""
    runs = Study(options, prepare_data(options))
    succeeded = options.train_none or runs.train_missing()
    times = StepTimes([json.loads(file.read_text(encoding="utf-8")) for file in options.times])
    report(runs.trained(), runs.window, times, options.output_dir)
    return succeeded


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_text_options(parser)
    add_run_options(parser, 300, (0,))
    ours = "configurations of this package (default: 4-bit gradients, also weights, overlapped, wan, islands)"
    parser.add_argument("--configs", type=Path, nargs="*", default=OURS, metavar="FILE", help=ours)
    parser.add_argument("--peers", nargs="*", choices=(*PEERS, *FSDP2), default=PEERS, metavar="PEER")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="settings to train")
    parser.add_argument("--train-none", action="store_true", help="only write tables of finished runs")
    times = "files of `bench step --output` with the step times"
    parser.add_argument("--times", type=Path, nargs="*", default=(), metavar="FILE.json", help=times)
    parser.add_argument("--hosts", type=positive_integer, nargs="+", default=[4, 2], help="(default: 4, then 2)")
    longest = "largest number of steps of the others; --steps are those of DDP to the goal (default: twice --steps)"
    parser.add_argument("--longest", type=positive_integer, metavar="STEPS", help=longest)
    parser.add_argument("--eval-every", type=positive_integer, default=20, metavar="STEPS")
    batch = "sequences in a micro-batch (default: as in the file)"
    parser.add_argument("--micro-batch", type=positive_integer, metavar="N", help=batch)
    options = parser.parse_args(argv)
    options.longest = options.longest or 2 * options.steps
    return options


Key = tuple[int, int, str]
"""Number of hosts, seed and name of a setting."""


class Study:
    """Runs of the options on the tokens of the key `data`."""

    def __init__(self, options: argparse.Namespace, data: str) -> None:
        self.options, self.data = options, data
        self.files = {file.stem: file for file in options.configs}
        self.window = min(WINDOW, options.steps)
        self.names = tuple(dict.fromkeys((BASELINE, *options.peers, *self.files)))

    def train_missing(self) -> bool:
        """Train the missing runs, DDP first, which sets the goal of the others. Return True if none has failed."""
        names = [name for name in self.names if name == BASELINE or self.options.only.search(name)]
        keys = list(product(self.options.hosts, self.options.seeds, names))
        outcomes = [self._run(key).train(self.options) for key in tracked(keys)]
        return all(outcomes)

    def trained(self) -> list[Trained]:
        """Return the finished runs, DDP first."""
        keys = [key for key in product(self.options.hosts, self.options.seeds, self.names) if self._file(key).is_file()]
        curves = ((key, self._run(key).curve()) for key in keys)
        return [Trained(name, hosts, seed, curve) for (hosts, seed, name), curve in curves if curve is not None]

    def _file(self, key: Key) -> Path:
        hosts, seed, name = key
        path: Path = self.options.output_dir / f"{hosts}hosts" / f"seed{seed}" / f"{name}.json"
        return path

    def _run(self, key: Key) -> Run:
        options, (hosts, seed, name) = self.options, key
        file = self.files.get(name, NATIVE)
        workload = self._workload(key, file)
        ds_config = trained_as(file, seed) | {"train_micro_batch_size_per_gpu": workload.micro_batch}
        batch_tokens = workload.micro_batch * workload.accumulation * hosts * options.seq_len
        job = Job(
            workload=workload,
            contender=Contender(name, name, ds_config if name in self.files else None),
            native={key: ds_config[key] for key in ("optimizer", "scheduler")},
            start=round(START * options.steps),
            steps=options.steps if name == BASELINE else options.longest,
            eval_every=options.eval_every,
            eval_batches=max(1, EVAL_TOKENS // batch_tokens),
            window=self.window,
            data=self.data,
            goal=None if name == BASELINE else self._goal(hosts, seed),
        )
        return Run(job, hosts, self._file(key))

    def _workload(self, key: Key, file: Path) -> Workload:
        """Return the common workload of all settings. DeepSpeed clips as `file` says, because Muon must not be clipped.

        Raises:
            ConfigError: `file` has another batch, precision or layout.
        """
        hosts, seed, _ = key
        sizes = {"micro_batch": self.options.micro_batch, "seq_len": self.options.seq_len, "seed": seed}
        groups = group_contenders([str(NATIVE), str(file)], str(self.options.model), (), sizes, hosts)
        common = groups[0].workload
        if any(replace(group.workload, clipping=common.clipping) != common for group in groups):
            raise ConfigError(f"{file}: batch, precision or layout differ from {NATIVE}; use the same ones")
        return common

    def _goal(self, hosts: int, seed: int) -> Goal:
        """Return the last losses of DDP.

        Raises:
            DataError: It is not trained yet.
        """
        curve = self._run((hosts, seed, BASELINE)).curve()
        if curve is None:
            raise DataError(
                f"{hosts} hosts, seed {seed}: {BASELINE}, which sets the goal, is not trained; train it first"
            )
        return goal_of(curve, self.window)


if __name__ == "__main__":
    sys.exit(main())
