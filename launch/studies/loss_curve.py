"""One training run of `time_to_loss` on this machine: the program of its ranks, and the curve that they leave.

What is trained is made as `ds-compress bench step` makes it to time it; batches, evaluations and schedules are those
of the training program. The network is this machine's memory: losses do not depend on it.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.systems import System, make
from deepspeed_compress.tools.bench.torch_loop import Optimizer
from deepspeed_compress.tools.bench.workload import Contender, Workload
from deepspeed_compress.tools.files import write_json
from deepspeed_compress.training.data import Windows, open_cache, split_windows
from deepspeed_compress.training.output import Display, display
from deepspeed_compress.training.stepper import eval_loss, mean_over_ranks, train_step

__all__ = ["HELD_OUT", "Curve", "Goal", "Job", "Point", "finished", "run_job"]

HELD_OUT = 0.05
"""Share of the text, at the end of each file."""
ATTEMPTS = 3
"""PyTorch's PowerSGD aborts on gloo now and then."""


@dataclass(frozen=True)
class Goal:
    """Losses to reach: on held-out text, and the mean of the last batches of training."""

    held_out: float
    train: float


@dataclass(frozen=True)
class Job:
    """Everything that decides a curve.

    `native`: keys of a ds_config that describe the optimizer and the schedule of those that DeepSpeed does not train.
    `start`: their first steps without compression, where the method has such. `steps`: the most of them; a run ends at
    the evaluation that finds both losses of `goal` reached. `window`: steps whose training losses are averaged.
    `data`: key of the tokens.
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
        parts = {"workload": Workload(**found["workload"]), "contender": Contender(**found["contender"])}
        goal = found["goal"]
        return cls(**{**found, **parts, "goal": Goal(**goal) if goal else None})


Point = tuple[float, float]
"""A step, and the loss after it."""


@dataclass(frozen=True)
class Curve:
    """`train`: mean loss of each batch. `held_out`: evaluations. `dense_steps`: so many began without compression.

    `step_seconds`: median of the first rank's steps, on a network that is this machine's memory. `gradient_bytes`: what
    a rank sent for gradients in the last step that was measured, and what it would have sent uncompressed; None where
    nobody counts.
    """

    dense_steps: int
    train: tuple[float, ...]
    held_out: tuple[Point, ...]
    step_seconds: float = field(default=math.nan, compare=False)
    gradient_bytes: tuple[int, int] | None = field(default=None, compare=False)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Curve":
        held_out = tuple((step, loss) for step, loss in found["held_out"])
        counted = found.get("gradient_bytes")
        seconds = found.get("step_seconds", math.nan)
        return cls(found["dense_steps"], tuple(found["train"]), held_out, seconds, tuple(counted) if counted else None)

    def smoothed(self, window: int) -> list[Point]:
        """Means of the last `window` losses of training, from the first step that has so many."""
        ends = range(window, len(self.train) + 1)
        return [(end, statistics.fmean(self.train[end - window : end])) for end in ends]

    def meets(self, goal: Goal, window: int) -> bool:
        """Both losses were reached, now or before."""
        means = self.smoothed(window)
        return _least(self.held_out) <= goal.held_out and _least(means) <= goal.train


def _least(points: Sequence[Point]) -> float:
    return min((loss for _, loss in points), default=math.inf)


def run_job(job: Job, ranks: int, cache_dir: Path, file: Path) -> bool:
    """Train in `ranks` processes, unless `file` is there; whether it is there now. Its log lies beside."""
    if file.is_file():
        return True
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file.with_suffix(".job"), asdict(job))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks))
    paths = (file.with_suffix(".job"), cache_dir, file)
    command = [sys.executable, *launch, "-m", "launch.studies.loss_curve", *map(str, paths)]
    with file.with_suffix(".log").open("a") as log:
        outcomes = (subprocess.run(command, stdout=log, stderr=log, check=False) for _ in range(ATTEMPTS))
        return any(outcome.returncode == 0 for outcome in outcomes)


def finished(file: Path) -> Curve | None:
    """What a run has left, if it has ended."""
    return Curve.from_json(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else None


def train(job: Job, cache_dir: Path, shown: Display) -> Curve:
    """On every rank; the curve is the same on all of them."""
    windows, held_out = split_windows(open_cache(cache_dir, job.data), job.workload.seq_len, HELD_OUT)
    system = make(job.workload, job.contender, Optimizer.of(job.native), job.start)
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
            shown.show(step, job.steps, f"held-out loss {curve.held_out[-1][1]:.4f}")
            if job.goal is not None and curve.meets(job.goal, job.window):
                break
    system.close()
    return replace(curve, step_seconds=statistics.median(seconds), gradient_bytes=_bytes(measured))


def _bytes(measured: Sequence[Any]) -> tuple[int, int] | None:
    return (measured[-1].bytes_sent, measured[-1].bytes_uncompressed) if measured else None


def _evaluated(job: Job, system: System, held_out: Windows, curve: Curve, losses: list[Tensor]) -> Curve:
    """The curve with the `losses` of this rank since the last evaluation, and a new one."""
    means = tuple(mean_over_ranks([loss], system.share) for loss in losses)
    loss = eval_loss(system.stepper, held_out, system.share, job.eval_batches, gauges.device())
    held_out_losses = (*curve.held_out, (len(curve.train) + len(losses), loss))
    return Curve(curve.dense_steps, curve.train + means, held_out_losses)


def main() -> int:
    job_file, cache_dir, result = (Path(argument) for argument in sys.argv[1:])
    job, ranks = Job.from_json(json.loads(job_file.read_text(encoding="utf-8"))), gauges.join()
    with display("steps", ranks.is_first) as shown:
        curve = train(job, cache_dir, shown)
    if ranks.is_first:
        write_json(result, {"job": asdict(job), "ranks": ranks.world_size, **asdict(curve)})
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
