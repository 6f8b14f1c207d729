"""Ranks as processes forked from a server that has imported torch and DeepSpeed."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class RankError(Exception):
    """A rank raised; the message is its traceback."""


def run_forks(ranks: int, work: Callable[..., T], *args: Any, timeout: float = 120) -> list[T]:
    """`work(rank, *args)` on every rank, with the environment that the deepspeed launcher sets.

    Returns the results in rank order. Raises RankError with the tracebacks of the ranks that raised, and TimeoutError
    when one hangs. `work` and its results must be picklable. Every process is gone afterwards.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    port = free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        context.Process(target=_run, args=(rank, ranks, port, work, args, pipe[1]), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        return _results([receiver for receiver, _ in pipes], time.monotonic() + timeout)
    finally:
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        # DeepSpeed leaves 66 MiB of shared memory behind for every rank and port.
        for leftover in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
            leftover.unlink(missing_ok=True)


def _results(receivers: list[Connection], deadline: float) -> list[Any]:
    outcomes = []
    for rank, receiver in enumerate(receivers):
        if not receiver.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError(f"rank {rank} hangs")
        try:
            outcomes.append(receiver.recv())
        except EOFError:
            outcomes.append((False, f"rank {rank} died without a result"))
    failures = [str(value) for good, value in outcomes if not good]
    if failures:
        raise RankError("\n".join(failures))
    return [value for _, value in outcomes]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(rank: int, ranks: int, port: int, work: Callable[..., Any], args: tuple[Any, ...], result: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
    }
    try:
        result.send((True, work(rank, *args)))
    except BaseException:
        result.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
