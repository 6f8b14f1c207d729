"""Single training run of a study on this machine: the program of its ranks, and the curve that it writes.

The engine is the one that `ds-compress bench step` times. Batches, evaluations and schedules are those of the training
program. The network is this machine's memory, which does not change any loss.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from deepspeed_compress.config import SECTION, parse_section, read_ds_config
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.peers import PEERS, Optimizer, Peer
from deepspeed_compress.tools.bench.systems import System, make
from deepspeed_compress.tools.bench.workload import Contender, Workload
from deepspeed_compress.training.data.tokens import Windows, open_cache, split_windows
from deepspeed_compress.training.stepper import eval_loss, mean_over_ranks, train_step
from launch.studies.harness import cache_dir, read_result, tracked

T = TypeVar("T")
HELD_OUT = 0.05
"""Share of the text that is held out at the end of each file."""
RATE_WARMUP_STEPS, WINDOW, EVAL_TOKENS = 20, 50, 16384
"""Usual steps of the warm-up, steps in a mean of training losses, and tokens of an evaluation."""
ATTEMPTS = 3
"""Number of attempts per run, because PyTorch's PowerSGD sometimes aborts on gloo."""


@dataclass(frozen=True)
class Goal:
    """Losses to reach: on held-out text, and as the mean of the last training batches."""

    held_out: float
    train: float


@dataclass(frozen=True)
class Job:
    """Complete description of a run.

    Attributes:
        workload: Model, batch and precision.
        contender: Engine and its configuration.
        native: Keys of a ds_config with the optimizer and the schedule of engines other than DeepSpeed.
        start: Uncompressed first steps of methods that have them.
        steps: Largest number of steps. A run ends earlier if both losses of `goal` are reached.
        eval_every: Steps between evaluations.
        eval_batches: Batches per evaluation.
        window: Steps in the mean of training losses.
        data: Key of the tokens.
        goal: Losses to reach, if any.
    """

    workload: Workload
    contender: Contender
    native: Mapping[str, Any]
    start: int
    steps: int
    eval_every: int
    eval_batches: int
    window: int
    data: str
    goal: Goal | None = None

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Job":
        """Return the job of a JSON object."""
        parts = {"workload": Workload(**found["workload"]), "contender": Contender(**found["contender"])}
        goal = found["goal"]
        return cls(**{**found, **parts, "goal": Goal(**goal) if goal else None})


Point = tuple[float, float]
"""Step and the loss after it."""


@dataclass(frozen=True)
class Curve:
    """Losses of a run.

    Attributes:
        dense_steps: Number of uncompressed first steps.
        train: Mean loss of each batch.
        held_out: Evaluations.
        step_seconds: Median seconds of the first rank's steps without a network.
        gradient_bytes: Bytes that a rank sent for gradients in the last measured step, and those that it would have
            sent uncompressed. None if they are not counted.
    """

    dense_steps: int
    train: tuple[float, ...]
    held_out: tuple[Point, ...]
    step_seconds: float = field(default=math.nan, compare=False)
    gradient_bytes: tuple[int, int] | None = field(default=None, compare=False)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Curve":
        """Return the curve of a JSON object."""
        held_out = tuple((step, loss) for step, loss in found["held_out"])
        counted = found.get("gradient_bytes")
        seconds = found.get("step_seconds", math.nan)
        return cls(found["dense_steps"], tuple(found["train"]), held_out, seconds, tuple(counted) if counted else None)

    def smoothed(self, window: int) -> list[Point]:
        """Return the means of the last `window` training losses, from step `window` on."""
        ends = range(window, len(self.train) + 1)
        return [(end, statistics.fmean(self.train[end - window : end])) for end in ends]

    def meets(self, goal: Goal, window: int) -> bool:
        """Return True if both losses have been reached at some step."""
        means = self.smoothed(window)
        return _least(self.held_out) <= goal.held_out and _least(means) <= goal.train


def _least(points: Sequence[Point]) -> float:
    return min((loss for _, loss in points), default=math.inf)


@dataclass(frozen=True)
class Run:
    """Run of a study in `ranks` processes of this machine. Its curve is in `file` when it is finished."""

    job: Job
    ranks: int
    file: Path

    def curve(self) -> Curve | None:
        """Return the curve of the finished run, or None.

        Raises:
            DataError: The run was made with other options.
        """
        result = read_result(self.file, "job", self.job)
        return None if result is None else Curve.from_json(result)

    def train(self, options: argparse.Namespace) -> bool:
        """Train unless the run is finished, with a log next to its file. Return True if it is finished now."""
        if self.curve() is not None:
            return True
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.file.with_suffix(".job"), asdict(self.job))
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(self.ranks))
        paths = (self.file.with_suffix(".job"), cache_dir(options), self.file)
        command = [sys.executable, *launch, "-m", "launch.studies.loss_curve", *map(str, paths)]
        with self.file.with_suffix(".log").open("a") as log:
            outcomes = (subprocess.run(command, stdout=log, stderr=log, check=False) for _ in range(ATTEMPTS))
            is_finished = any(outcome.returncode == 0 for outcome in outcomes)
        if not is_finished:
            print(f"{self.file}: failed, see {self.file.with_suffix('.log')}", file=sys.stderr)
        return is_finished


def train_all(runs: Mapping[T, Run], options: argparse.Namespace) -> dict[T, Curve | None]:
    """Train the runs that are not finished. Return the curve of each, or None if it failed."""
    for run in tracked([*runs.values()]):
        run.train(options)
    return {key: run.curve() for key, run in runs.items()}


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


def peers_for(contender: Contender) -> Mapping[str, Peer]:
    """Return the peers among which a contender is. Megatron-core belongs to a separate extra."""
    if not contender.kind.startswith("megatron"):
        return PEERS
    from launch.studies import megatron_stepper

    return megatron_stepper.PEERS


def train(job: Job, tokens: Path, *, prints: bool) -> Curve:
    """Train on every rank. The returned curve is the same on all ranks."""
    windows, held_out = split_windows(open_cache(tokens, job.data), job.workload.seq_len, HELD_OUT)
    system = make(job.workload, job.contender, Optimizer.from_config(job.native), job.start, peers_for(job.contender))
    curve, losses = Curve(system.dense_steps, (), ()), list[Tensor]()
    seconds, measured = list[float](), list[Any]()
    if system.session is not None:
        system.session.subscribe(measured.append)
    for step in range(1, job.steps + 1):
        begin = time.perf_counter()
        losses.append(train_step(system.stepper, windows, system.share, job.workload.seed, step, gauges.device()))
        seconds.append(time.perf_counter() - begin)
        if step % job.eval_every == 0 or step == job.steps:
            curve = _evaluated(job, system, held_out, curve, losses)
            losses.clear()
            if prints:
                print(f"{step}/{job.steps}  held-out loss {curve.held_out[-1][1]:.4f}", flush=True)
            if job.goal is not None and curve.meets(job.goal, job.window):
                break
    system.close()
    return replace(curve, step_seconds=statistics.median(seconds), gradient_bytes=_bytes(measured))


def _bytes(measured: Sequence[Any]) -> tuple[int, int] | None:
    return (measured[-1].bytes_sent, measured[-1].bytes_uncompressed) if measured else None


def _evaluated(job: Job, system: System, held_out: Windows, curve: Curve, losses: list[Tensor]) -> Curve:
    """Return the curve with a new evaluation and the mean of the `losses` since the last one."""
    means = tuple(mean_over_ranks([loss], system.share) for loss in losses)
    loss = eval_loss(system.stepper, held_out, system.share, job.eval_batches, gauges.device())
    held_out_losses = (*curve.held_out, (len(curve.train) + len(losses), loss))
    return Curve(curve.dense_steps, curve.train + means, held_out_losses)


def main() -> int:
    """Train the job of the first argument, and write its curve on the first rank."""
    job_file, cache_dir, result = (Path(argument) for argument in sys.argv[1:])
    job, ranks = Job.from_json(json.loads(job_file.read_text(encoding="utf-8"))), gauges.join()
    curve = train(job, cache_dir, prints=ranks.is_first)
    if ranks.is_first:
        write_json(result, {"job": asdict(job), "ranks": ranks.world_size, **asdict(curve)})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
