"""Short real runs that test the doctor: some with a known fault, some healthy.

`python -m tests.tools.doctor.recordings [NAME ...]` repeats runs of `RECORDINGS`, each in 10 to 60 seconds on two
cores, and records them in tests/tools/doctor/runs/NAME. Runs with a `rate` need root and iproute2, to slow down links.
"""

import argparse
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parent / "runs"
POLICY = "policy"
"""Directory of weights for rollout workers."""
DIGITS = 4
"""Number of significant digits in recorded figures."""


@dataclass(frozen=True)
class Recording:
    """A run of a few ranks."""

    finds: str | None
    """Name of the finding that the doctor must report first; None for a healthy run."""
    section: Mapping[str, Any]
    stage: int = 2
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are merged into the ds_config."""
    width: int = 512
    batch: int = 256
    steps: int = 60
    lr: float = 1e-3
    ranks: int = 2
    rate: str | None = None
    """Rate of the links between emulated hosts, such as 100mbit; None for processes on one machine."""
    environment: Mapping[str, str] = field(default_factory=dict)
    every: int = 2
    step: Callable[[int, int], None] = lambda rank, step: None
    """Called by each rank before each step."""
    scale: Callable[[int], float] = lambda step: 1.0
    """Factor for the inputs of a step."""
    baseline: str | None = None
    """Name of the run to compare with."""
    apart: bool = False
    """True if ranks learn different functions."""
    divided: bool = False
    """True if tensor-parallel ranks train a small Llama, always on one batch."""
    jobs: bool = False
    """True if each of the two ranks is a separate job and an island; the later island is recorded."""
    lag: float | None = None
    """Number of versions by which rollouts are behind; None if nothing is published for rollout workers."""

    def config(self, directory: str) -> dict[str, Any]:
        section = {**self.section, "monitor": {"path": directory, **_monitor(self)}}
        if self.lag is not None:
            section["rollout"] = {"directory": f"{directory}/{POLICY}", **section["rollout"]}
        return {
            "train_micro_batch_size_per_gpu": self.batch,
            "steps_per_print": 10**6,
            "optimizer": {"type": "AdamW", "params": {"lr": self.lr, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage},
            **self.extra,
            "deepspeed_compress": section,
        }


def _monitor(recording: Recording) -> dict[str, Any]:
    return {"every": recording.every, **recording.section.get("monitor", {})}


def _comes_late(rank: int, step: int) -> None:
    time.sleep(0.9 if rank else 0.05)


def _sleeps(rank: int, step: int) -> None:
    if rank == 1:
        time.sleep(0.1)


def _sleeps_by_turns(rank: int, step: int) -> None:
    if step // 2 % 2 == rank:
        time.sleep(0.1)


def _islands(sync_every: int) -> dict[str, Any]:
    return {"gradients": {"method": "none"}, "islands": {"size": 1, "sync_every": sync_every, "exchange": {"bits": 4}}}


def _with(section: dict[str, Any], **islands: Any) -> dict[str, Any]:
    return {**section, "islands": {**section["islands"], **islands}}


def _few_large_batches(outer: dict[str, Any]) -> Recording:
    section = _with(_islands(4), outer=outer)
    return Recording("sync-every-too-long", section, stage=1, width=128, batch=1024, steps=34, lr=1e-2, every=1)


IMPATIENT = {"rendezvous": "127.0.0.1:29431", "timeout": "0.5 s"}
TOO_FAR = {"optimizer": "average", "lr": 2.0}
GUARD = {"guard": {"on_anomaly": "report"}}
INT4 = {"method": "blockwise", "bits": 4}
RISING_RATE = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.3, "warmup_num_steps": 60, "warmup_type": "linear"},
    }
}
NO_MOMENTUM = {"optimizer": {"type": "SGD", "params": {"lr": 1e-2}}, "zero_allow_untested_optimizer": True}

RECORDINGS: Mapping[str, Recording] = {
    "forgetful-topk": Recording(
        "compression-too-strong",
        {"gradients": {"method": "topk", "density": 0.0001, "error_feedback": None}, "monitor": {"cosine_every": 6}},
        lr=1e-2,
    ),
    "late-topk": Recording("compression-too-strong", {"gradients": {"method": "topk", "density": 0.001}, **GUARD}),
    "fast-learning": Recording("diverging", {"gradients": {"bits": 8}, **GUARD}, extra=RISING_RATE),
    "slow-network": Recording(
        "communication-bound", {"gradients": {"bits": 8}, "weights": {"bits": 8}}, rate="100mbit", width=1024, steps=40
    ),
    "micro-steps": Recording(
        "communication-bound",
        {"gradients": INT4, "weights": {"bits": 4}},
        extra={"gradient_accumulation_steps": 4},
        rate="100mbit",
        width=1024,
        batch=64,
        steps=40,
    ),
    "dense-weights": Recording(
        "weights-uncompressed", {"gradients": INT4}, rate="100mbit", width=2048, batch=64, steps=36, stage=1
    ),
    "plain-kernels": Recording(
        "slow-kernels",
        {"gradients": {**INT4, "rounding": "stochastic"}},
        width=2048,
        batch=64,
        steps=40,
        environment={"DEEPSPEED_COMPRESS_KERNELS": "torch"},
    ),
    "costly-method": Recording(
        "compression-does-not-pay",
        {"gradients": {"method": "powersgd", "rank": 64}},
        stage=0,
        width=1024,
        batch=64,
        steps=40,
        baseline="dense",
    ),
    "local-sums": Recording(
        "activations-do-not-pay", {"activations": {"tensor": {"bits": 8}}}, stage=1, steps=40, divided=True
    ),
    "sleeping-rank": Recording("straggler", {"gradients": INT4}, step=_sleeps),
    "excluded": Recording("nothing-compressed", {"gradients": {**INT4, "min_numel": 10_000_000}}),
    "endless-warm-up": Recording("never-in-force", {"gradients": INT4, "schedule": {"warmup_steps": 1000}}),
    "half-dense": Recording("no-ratio", {"gradients": {"method": "topk", "density": 0.7}}),
    "fp32-memory": Recording(
        "large-residuals",
        {"gradients": {"method": "dgc", "density": 0.01, "memory": {"dtype": "fp32"}}},
        extra=NO_MOMENTUM,
        width=4096,
        steps=36,
    ),
    "nervous-guard": Recording(
        "guard-fires-often",
        {"gradients": INT4, "guard": {"exploding": 3.0, "window": 16, "skip_steps": False}},
        scale=lambda step: 8.0 if step % 11 == 10 else 1.0,
    ),
    # Every second step is measured, and exchanges show in the step that follows.
    "other-data": Recording("islands-drift-apart", _islands(5), stage=1, width=128, lr=1e-2, apart=True),
    "rare-exchanges": Recording("islands-drift-apart", _islands(7), stage=1, width=256, lr=4e-1),
    "too-far": _few_large_batches(TOO_FAR),
    "momentum-too-far": _few_large_batches({"optimizer": "nesterov", "lr": 1.0}),
    "islands-in-full": Recording(
        "other-traffic",
        {"gradients": INT4, "islands": {"size": 2, "sync_every": 1, "exchange": {"method": "none"}}},
        stage=0,
        ranks=4,
        width=1536,
        batch=32,
        steps=24,
        every=1,
        rate="200mbit",
    ),
    "late-island": Recording(
        "late-island",
        {"gradients": {"method": "none"}, "islands": {"sync_every": 5, "exchange": INT4, "elastic": IMPATIENT}},
        stage=1,
        width=128,
        batch=64,
        steps=24,
        every=1,
        step=_comes_late,
        jobs=True,
    ),
    "far-behind": Recording("old-rollouts", {"rollout": {"every": 2}}, batch=1024, steps=36, lag=9.5),
    "many-full-copies": Recording(
        "frequent-full-copies", {"rollout": {"every": 2, "full_every": 3}}, batch=1024, steps=36, lr=1e-5, lag=1.0
    ),
    "healthy-islands": Recording(None, _islands(5), stage=1, width=128, batch=1024),
    "late-by-turns": Recording(None, {"gradients": INT4}, step=_sleeps_by_turns),
    "costly-transform": Recording(
        "compression-bound", {"gradients": {"method": "demo"}}, extra=NO_MOMENTUM, width=1024, batch=64, steps=40
    ),
    "bad-data": Recording(
        "skipped-steps",
        {"gradients": INT4, **GUARD},
        steps=56,
        scale=lambda step: math.inf if step % 9 == 8 else 1.0,
    ),
    "dense": Recording(None, {"gradients": {"method": "none"}}, stage=0, width=1024, batch=64, steps=40),
    "healthy-default": Recording(None, {}, batch=1024),
    "healthy-zero0-int4-guard": Recording(None, {"gradients": INT4, "guard": {}}, stage=0, batch=1024),
    "healthy-zero1-weights": Recording(None, {"gradients": INT4, "weights": {"bits": 4}}, stage=1, batch=1024),
    "healthy-zero3": Recording(None, {"gradients": {"bits": 8}, "weights": {"bits": 8}}, stage=3, batch=1024),
    "healthy-warm-up": Recording(
        None, {"gradients": {"method": "topk", "density": 0.1}, "schedule": {"warmup_steps": 10}, **GUARD}
    ),
    "healthy-fast-network": Recording(
        None, {"gradients": INT4, "weights": {"bits": 4}}, rate="1gbit", width=1024, steps=40, batch=512
    ),
}


def train(rank: int, name: str, directory: str, until: Path | None = None) -> list[float]:
    """Train as one rank and return its losses: regression on a fixed function.

    With `until`, train until that file exists, for any number of steps.
    """
    recording = RECORDINGS[name]
    os.environ |= recording.environment
    if recording.divided:
        return _train_divided(recording, directory)
    import torch
    from torch import nn

    import deepspeed_compress

    torch.manual_seed(0)
    torch.set_num_threads(1)
    width = recording.width
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 64))
    teacher = torch.randn(64, 64) / 8
    if recording.apart and rank:
        teacher = torch.randn(64, 64) / 8
    config = recording.config(directory)
    engine = deepspeed_compress.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    numbers, losses = torch.Generator().manual_seed(1 + rank), []
    steps = range(recording.steps * config.get("gradient_accumulation_steps", 1))
    for step in steps if until is None else itertools.takewhile(lambda _: not until.exists(), itertools.count()):
        recording.step(rank, step)
        x = recording.scale(step) * torch.randn(recording.batch, 64, generator=numbers)
        loss = (engine(x) - torch.tanh(x @ teacher)).square().mean()
        engine.backward(loss)
        if recording.lag is not None:
            engine.rollout.report_lag(recording.lag)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _train_divided(recording: Recording, directory: str) -> list[float]:
    from tests.support import split_llama

    monitor = {"monitor": {"path": directory, **_monitor(recording)}}
    engine = split_llama.start(split_llama.Job(recording.section["activations"], recording.stage, section=monitor))
    return [loss for _ in range(recording.steps) for loss in split_llama.train(engine, steps=1)]


def train_island(rank: int, name: str, directory: str, ports: list[int]) -> list[float]:
    """Train as a job of one rank. The earlier job continues until the recorded one has ended."""
    from tests.support.coordinators import become_island

    become_island(rank, 1, ports)
    ended = Path(directory) / "ended"
    losses = train(rank, name, f"{directory}/{rank}", ended if rank == 0 else None)
    ended.touch()
    return losses


def make(name: str) -> None:
    """Run the recording `name` and store its files."""
    with tempfile.TemporaryDirectory() as scratch:
        recording = RECORDINGS[name]
        source = Path(scratch) / "1" if recording.jobs else Path(scratch)
        run = _as_jobs if recording.jobs else _on_hosts if recording.rate else _on_machine
        run(name, recording, Path(scratch))
        _record(source, RUNS / name, recording)


def _on_machine(name: str, recording: Recording, directory: Path) -> None:
    from tests.support.forks import run_forks

    losses = run_forks(recording.ranks, train, name, str(directory), timeout=300, shared_memory=recording.divided)[0]
    _write_metrics(directory, recording, losses)


def _as_jobs(name: str, recording: Recording, directory: Path) -> None:
    from tests.support.coordinators import coordinator, own_ports
    from tests.support.forks import run_forks

    port = int(recording.section["islands"]["elastic"]["rendezvous"].rpartition(":")[2])
    with coordinator(port=port), own_ports(2) as ports:
        losses = run_forks(2, train_island, name, str(directory), ports, timeout=300)
    _write_metrics(directory / "1", recording, losses[1])


def _on_hosts(name: str, recording: Recording, directory: Path) -> None:
    from deepspeed_compress.tools.bench.hosts import Cluster, signals_as_exceptions

    assert recording.rate is not None, "a recording on hosts needs the rate of their links"
    command = [sys.executable, "-m", "tests.tools.doctor.recordings", "--rank-of", name, "--directory", str(directory)]
    with signals_as_exceptions(), Cluster(recording.ranks, recording.rate) as cluster:
        run = cluster.run(command, recording.environment, timeout=300)
    if run.failure is not None:
        raise SystemExit(f"{name}: {run.failure}\n{run.outputs[0][-2000:]}\n{run.outputs[1][-2000:]}")


def _write_metrics(directory: Path, recording: Recording, losses: list[float]) -> None:
    """Write the loss of every measured step and a final summary, as the training program does."""
    micro = len(losses) // recording.steps
    lines = [
        json.dumps({"step": step, "train_loss": losses[step * micro - 1]})
        for step in range(recording.every, recording.steps + 1, recording.every)
    ]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    summary = {"steps": recording.steps, "world_size": recording.ranks}
    (directory / "summary.json").write_text(json.dumps(summary) + "\n")


def _record(source: Path, target: Path, recording: Recording) -> None:
    """Copy the files of a run, with rounded figures and without paths of this machine."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for file in sorted(source.glob("*.jsonl")):
        lines = [_rounded(json.loads(line)) for line in file.read_text().splitlines()]
        (target / file.name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    shutil.copy(source / "summary.json", target)
    config = json.loads((source / "ds_config.json").read_text())
    config["deepspeed_compress"]["monitor"].pop("path")
    if recording.lag is not None:
        config["deepspeed_compress"]["rollout"]["directory"] = POLICY
    (target / "ds_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(child) for key, child in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RECORDINGS)} (default: all)")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        rank, recording = int(os.environ["RANK"]), RECORDINGS[options.rank_of]
        losses = train(rank, options.rank_of, options.directory)
        if rank == 0:
            _write_metrics(Path(options.directory), recording, losses)
        return
    for name in options.names or RECORDINGS:
        begin = time.monotonic()
        make(name)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
