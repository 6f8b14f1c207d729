"""Processes that train together, and their results, one line of JSON each, so that results survive a crash."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

PACKAGES = ("deepspeed", "hjson", "pydantic", "safetensors")
"""Packages that ranks need besides torch."""
_PROGRAM = "tests.gpu.ranks"
_SHOWN = 500
_ROOT = str(Path(__file__).parents[2])


@dataclass(frozen=True)
class Outcome:
    """Results that each rank produced. `trouble` is what ended the ranks prematurely, or ""."""

    results: tuple[tuple[dict[str, Any], ...], ...]
    trouble: str


def environment_on(device: str) -> dict[str, str]:
    """Return the environment of a program that uses `device` and finds this checkout."""
    path = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "DS_ACCELERATOR": device, "PYTHONPATH": path}


def backend_here(device: str, ranks: int) -> str:
    """Return "nccl" if each rank has a GPU of its own, which NCCL requires, else "gloo"."""
    import torch

    return "nccl" if device == "cuda" and torch.cuda.device_count() >= ranks else "gloo"


def run_ranks(
    ranks: int,
    work: str,
    job: Mapping[str, Any],
    seconds: float,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Run `work(job)` on every rank. All ranks end if one fails or after `seconds`.

    Args:
        ranks: Number of ranks.
        work: "module:name" of a generator of results.
        job: Argument of `work`, with a `backend` and a `device`.
        seconds: Time limit.
        environment: Additional environment variables.
    """
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        files = [Path(directory) / f"rank_{rank}" for rank in range(ranks)]
        environments = [
            {**environment_on(job["device"]), **environment, **_place(rank, ranks, job)} for rank in range(ranks)
        ]
        port = str(_free_port())
        processes = [
            stack.enter_context(_Rank(work, job, file, {**one, "MASTER_PORT": port}))
            for file, one in zip(files, environments, strict=True)
        ]
        trouble = _wait(processes, time.monotonic() + seconds)
        return Outcome(tuple(tuple(_lines(file.with_suffix(".jsonl"))) for file in files), trouble)


def _place(rank: int, ranks: int, job: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of a rank. Without NCCL, all ranks share the first GPU."""
    local = str(rank if job["backend"] == "nccl" else 0)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": local,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Rank:
    """Process that writes its results to `file`.jsonl and other output to `file`. Leaving the context ends it."""

    def __init__(self, work: str, job: Mapping[str, Any], file: Path, environment: Mapping[str, str]) -> None:
        self._file = file
        command = [sys.executable, "-m", _PROGRAM, work, json.dumps(dict(job)), str(file.with_suffix(".jsonl"))]
        with file.open("w") as stream:
            self._process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=dict(environment))

    def __enter__(self) -> "_Rank":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def output(self) -> str:
        return self._file.read_text(errors="replace").strip()[-_SHOWN:]


def _wait(processes: Sequence[_Rank], until: float) -> str:
    while any(process.code is None for process in processes):
        if failed := [process for process in processes if process.code]:
            return f"a rank ended with status {failed[0].code}: {failed[0].output()}"
        if time.monotonic() > until:
            return f"ended at its limit: {processes[0].output()}"
        time.sleep(0.05)
    failed = [process for process in processes if process.code]
    return f"a rank ended with status {failed[0].code}: {failed[0].output()}" if failed else ""


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else ():
        if line.endswith("\n"):
            yield json.loads(line)


def _main() -> None:
    work, job, file = sys.argv[1:]
    module, _, name = work.partition(":")
    given = json.loads(job)
    with Path(file).open("w", encoding="utf-8") as stream:
        _join(given["backend"])
        for result in getattr(import_module(module), name)(given):
            stream.write(json.dumps(result) + "\n")
            stream.flush()
    # Exit at once, because messages that other ranks still send do not matter.
    os._exit(0)


def _join(backend: str) -> None:
    """Join the other ranks. No extension is built, because there may be no compiler."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from tests.gpu.delays import LATE_MIRROR, join_late_mirror

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    if backend == LATE_MIRROR:
        join_late_mirror(2)
    elif backend == "gloo":
        # DeepSpeed would bind ranks to their GPU, and torch then splits groups, which gloo cannot do.
        torch.distributed.init_process_group(backend)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False)


if __name__ == "__main__":
    _main()
