"""Jobs with agents: their commands, the records that their ranks write, and their processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.support.processes import start_ticks

T = TypeVar("T")
PROGRAM = Path(__file__).parent / "agent_program.py"
PATIENCE = 400.0
"""Time limit in seconds for what only a hang delays that long, on a machine that is busy with other things."""


def write_config(directory: Path, stage: int = 1, every: int = 3, **changes: Any) -> Path:
    """Write a configuration that saves checkpoints in `directory`."""
    section = {
        "gradients": {"bits": 4, "block_size": 32},
        "checkpointing": {"every": every, "directory": str(directory / "checkpoints"), "keep": 3},
    }
    config = {
        "train_batch_size": 12,
        "steps_per_print": 10**6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "deepspeed_compress": section,
        **changes,
    }
    file = directory / "ds_config.json"
    file.write_text(json.dumps(config))
    return file


def command(directory: Path, *options: str, steps: int = 20, ranks: int = 2, program: Path = PROGRAM) -> list[str]:
    """Return the command of a job in `directory`, which has a configuration of `write_config`."""
    own = ["--restarts", "5", "--ranks", str(ranks), "--grace", "10 s", *options]
    args = [str(program), "--deepspeed", str(directory / "ds_config.json"), str(directory), str(steps)]
    return [sys.executable, "-m", "deepspeed_compress.cli", "run", *own, *args]


class Job:
    """Running command with its output in the file `log`. At the end of the context, it is killed."""

    def __init__(self, arguments: Sequence[str], log: Path, **environment: str) -> None:
        self._file = log
        self._stream = log.open("wb")
        self.process = subprocess.Popen(
            arguments,
            stdout=self._stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._stream.close()

    @property
    def log(self) -> str:
        return self._file.read_text(errors="replace")

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for the end of the command, and return its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the command has not ended in {seconds} s:\n{self.log}") from None


def until(find: Callable[[], T | None], job: Job, seconds: float = PATIENCE) -> T:
    """Wait until `find` returns a true value, and return that."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert job.process.poll() is None, f"the job has ended:\n{job.log}"
        assert time.monotonic() < deadline, f"nothing was found in {seconds} s:\n{job.log}"
        time.sleep(0.01)
    return found


def records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of all ranks in order of time: one at each start, one after loading, one for each step."""
    lines = [line for file in directory.glob("rank_*.jsonl") for line in file.read_text().splitlines()]
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return sorted(found, key=lambda one: one["time"])


def steps(directory: Path, rank: int) -> list[dict[str, Any]]:
    return [record for record in records(directory) if record["rank"] == rank and "loss" in record]


def starts(directory: Path, rank: int) -> list[dict[str, Any]]:
    return [record for record in records(directory) if record["rank"] == rank and "pid" in record]


def at_step(directory: Path, rank: int, step: int) -> Callable[[], dict[str, Any] | None]:
    """Return a function that returns the latest start of `rank` once it has made `step`."""

    def find() -> dict[str, Any] | None:
        return starts(directory, rank)[-1] if any(one["step"] >= step for one in steps(directory, rank)) else None

    return find


def saved_step(directory: Path) -> int:
    """Return the step of the newest complete checkpoint on disk; 0 if there is none."""
    latest = directory / "checkpoints" / "latest"
    return int(latest.read_text().strip().removeprefix("global_step")) if latest.is_file() else 0


def hold(directory: Path, *steps: int) -> None:
    """Make all ranks wait after each of `steps`, until `release`."""
    for step in steps:
        (directory / f"hold_{step}").touch()


def release(directory: Path, step: int) -> None:
    (directory / f"hold_{step}").unlink()


def result(directory: Path) -> list[dict[str, Any]]:
    """Return the final result of each rank: a digest of its weights, and its loss."""
    return [json.loads(file.read_text()) for file in sorted(directory.glob("result_*.json"))]


def kill(start: Mapping[str, Any], number: int = signal.SIGKILL) -> None:
    """Send a signal to the process of a `starts` record, unless it has ended.

    Its id may belong to another process or thread by then: in minutes, the tests use up all of the machine's ids.
    """
    with contextlib.suppress(OSError):
        if start_ticks(start["pid"]) == start["ticks"]:
            os.kill(start["pid"], number)
