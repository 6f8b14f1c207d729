"""Runs of programs on ranks: many in the same processes, with failures isolated."""

import contextlib
import gc
import io
import itertools
import pickle
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch.distributed as dist

from deepspeed_compress.backends.deepspeed import engine_facts
from deepspeed_compress.errors import CompressError
from deepspeed_compress.integrations import install
from deepspeed_compress.policy import policy
from deepspeed_compress.policy.auto import AutoChoice
from tests.backends.deepspeed.programs.program import Program, Records, Run
from tests.support.forks import RankError, run_forks
from tests.support.methods import NONE, RAW

SECTIONS: Mapping[str, Mapping[str, Any] | None] = {
    "plain": None,
    "none": NONE,
    "raw": RAW,
    "auto": {**RAW, "auto": {}},
    "4 bits": {"gradients": {"bits": 4, "block_size": 32}},
    "weights": {"gradients": {"bits": 4, "block_size": 32}, "weights": {"bits": 8, "min_numel": 10}},
    "nodes": {**NONE, "parallelism": {"shard_within": 2}},
    "raw nodes": {**RAW, "parallelism": {"shard_within": 2}},
}
"""Sections by name. `plain` has no package. `raw` sends every parameter uncompressed through our own exchange,
and `auto` does so in some steps, between others that are left to DeepSpeed (see `_Alternating`). `nodes` exchange
after backward, and `raw nodes` during it."""

OTHER_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "overlap": {**RAW, "weights": {"bits": 8, "min_numel": 10, "overlap": True}},
    "background": {**NONE, "checkpointing": {}},
    "islands": {**NONE, "islands": {"size": 2, "sync_every": 1, "exchange": NONE["gradients"], "second_moments": {}}},
}
"""Sections for some programs. `islands` is one island of two ranks, whose exchanges change nothing."""

SECONDS = 30
"""Timeout of a collective in seconds."""


class _Alternating(AutoChoice):
    """Choice that never ends. Of four steps, one is ours, one sends residuals, and two are DeepSpeed's."""

    @property
    def alone(self) -> bool:
        return self._steps % 4 != 1

    @property
    def measures(self) -> bool:
        return False

    def see(self, step_ms: float, shapes: Any) -> bool:
        self._steps += 1
        return False

    def saved(self) -> dict[str, Any]:
        return {"auto": {"steps": self._steps}}

    def load(self, saved: Mapping[str, Any]) -> None:
        self._steps = saved["auto"]["steps"]


@dataclass(frozen=True)
class Task:
    """Program at a ZeRO stage, with the name of a section."""

    program: Program
    stage: int
    section: str


@dataclass(frozen=True)
class Result:
    """Result of one rank: its records, and the message and the place in the code of its error.

    `refused` is True if the error is one of the package and came before the first step of an engine.
    """

    records: Records
    error: str = ""
    refused: bool = False
    place: str = ""


def tasks_of(programs: Iterable[Program], stage: int, sections: Sequence[str]) -> list[Task]:
    """Return the tasks of a stage.

    Programs that fail with DeepSpeed have only a plain task, and without ZeRO there are no compressed weights.
    """
    return [
        Task(program, stage, section)
        for program in programs
        if stage in program.stages
        for section in sections
        if section == "plain" or (stage not in program.fails and (stage > 0 or section not in ("weights", "overlap")))
    ]


def run_tasks(tasks: Sequence[Task], directory: Path) -> Iterator[tuple[Task, list[Result]]]:
    """Yield tasks and results by rank, in order. After a failure, the remaining tasks run on new ranks.

    Args:
        tasks: the tasks.
        directory: place for the results of the ranks.
    """
    for _, together in itertools.groupby(tasks, _shares):
        batch = list(together)
        while batch:
            results = _run(batch, directory / str(time.monotonic_ns()))
            yield from zip(batch, results, strict=False)
            batch = batch[len(results) :]


def _shares(task: Task) -> tuple[int, str]:
    return task.program.ranks, task.program.name if task.program.alone else ""


def _run(batch: list[Task], directory: Path) -> list[list[Result]]:
    """Return the results of the tasks that ended, of which the last may have failed. Ranks without a result hung."""
    directory.mkdir(parents=True)
    ranks = batch[0].program.ranks
    # If ranks died or hung, the finished tasks have left their results.
    with contextlib.suppress(RankError, TimeoutError):
        run_forks(ranks, _work, batch, directory, timeout=2 * SECONDS + 5 * len(batch))
    results: list[list[Result]] = []
    for index in range(len(batch)):
        results.append([_read(directory / f"{index}-{rank}.pickle") for rank in range(ranks)])
        if any(result.error and not result.refused for result in results[-1]):
            break
    return results


def _read(file: Path) -> Result:
    return pickle.loads(file.read_bytes()) if file.exists() else Result([], "hangs")


def _work(rank: int, batch: list[Task], directory: Path) -> None:
    sys.stdout = io.StringIO()
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=SECONDS))
    for index, task in enumerate(batch):
        # Exclude imported objects from garbage collection, which DeepSpeed runs often, to make it fast.
        gc.freeze()
        result = run_task(task, rank, directory / f"files-{index}")
        partial = directory / f"{index}-{rank}.partial"
        partial.write_bytes(pickle.dumps(result))
        partial.rename(partial.with_suffix(".pickle"))
        if result.error and not result.refused:
            return


def run_task(task: Task, rank: int, directory: Path) -> Result:
    section = {**SECTIONS, **OTHER_SECTIONS}[task.section]
    run = Run(task.program, task.stage, rank, section, directory)
    uninstall = (lambda: None) if section is None else install()
    # Other buckets have their size from the configuration.
    ours = task.stage == 0 or task.section == "raw nodes"
    small = patch.object(engine_facts, "SMALLEST_BUCKET", 600 if ours else engine_facts.SMALLEST_BUCKET)
    small.start()
    alternating = patch.object(policy, "AutoChoice", _Alternating)
    alternating.start()
    try:
        run.program.train(run)
        run.finish()
        dist.barrier()
        return Result(run.records)
    except Exception as error:
        refused = isinstance(error, CompressError) and run.steps == 0
        message = f"{type(error).__name__}: {error}"
        return Result(run.records, message, refused, "".join(traceback.format_tb(error.__traceback__)))
    finally:
        alternating.stop()
        small.stop()
        uninstall()
        gc.collect()
