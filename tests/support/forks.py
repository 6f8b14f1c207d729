"""Ranks as processes forked from a server that lives for the session: ready in a tenth of a second, and always new."""

import gc
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from tests.support.leftovers import own_port

T = TypeVar("T")


class RankError(Exception):
    """A rank raised; the message is its traceback."""


def run_forks(
    ranks: int, work: Callable[..., T], *args: Any, timeout: float = 360, shared_memory: bool = False
) -> list[T]:
    """`work(rank, *args)` on every rank, with the environment that the deepspeed launcher sets.

    Returns the results in rank order. Raises RankError with the tracebacks of the ranks that raised, and TimeoutError
    when one hangs. `work` and its results must be picklable. Every process is gone afterwards.

    `shared_memory`: with DeepSpeed's own, by which `inference_all_reduce` sums on one machine. It takes 66 MiB and
    longer to set up than all else, and only tensor parallel layers use it.
    """
    context = multiprocessing.get_context("forkserver")
    warm_up()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    with own_port() as port:
        environment = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu",
        }
        processes = [
            context.Process(target=_run, args=(rank, environment, shared_memory, work, args, sender), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            return _results([receiver for receiver, _ in pipes], time.monotonic() + timeout)
        finally:
            _end([process for process in processes if process.pid is not None])


def warm_up() -> None:
    """Start the server, unless it runs: ten seconds, for which this does not wait."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.support.preload"])
    forkserver.ensure_running()


def _end(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.join(2)
        if process.is_alive():
            process.kill()
            process.join()


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


def _run(
    rank: int,
    environment: dict[str, str],
    shared_memory: bool,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    result: Connection,
) -> None:
    import deepspeed
    import torch

    # What is imported is no garbage.
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        _be_silent()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    if not shared_memory:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        result.send((True, work(rank, *args)))
    except BaseException:
        result.send((False, f"rank {rank}:\n{traceback.format_exc()}"))


def _be_silent() -> None:
    """Beside other tests nobody captures what is written; errors go another way."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)


def _end_with_parent() -> None:
    """A rank that waits for others would outlive tests that were killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
