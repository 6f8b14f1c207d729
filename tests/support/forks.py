"""Ranks as processes that a fork server starts in a tenth of a second. The server runs as long as the tests."""

import faulthandler
import gc
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar, cast

from tests.support.leftovers import own_port

T = TypeVar("T")


GRACE = 30.0
"""Default number of seconds for which the other ranks may continue after one has failed."""
_SHOWN = 4000
"""Number of characters that are shown of what a dead rank has printed last."""


class RankError(Exception):
    """Error of a rank, with its traceback as the message."""


def run_forks(
    ranks: int,
    work: Callable[..., T],
    *args: Any,
    timeout: float = 360,
    grace: float = GRACE,
    shared_memory: bool = False,
    compiled: bool = False,
) -> list[T]:
    """Run `work(rank, *args)` on every rank, with the environment that the deepspeed launcher sets.

    All processes have ended when this returns or raises.

    Args:
        ranks: number of ranks.
        work: function to run; it and its results must be picklable.
        args: further arguments of `work`.
        timeout: seconds after which a rank hangs.
        grace: seconds for which the other ranks may continue after one has failed or died.
        shared_memory: use DeepSpeed's shared memory, which `inference_all_reduce` of tensor-parallel layers needs. It
            takes 66 MiB per rank and more time than the rest of the start.
        compiled: let torch.compile compile, which takes seconds. Its kernels, and their rounding, depend on the shapes
            that the rank saw before.

    Returns:
        The results in rank order.

    Raises:
        RankError: ranks have raised or died. The message has their tracebacks, or exit codes and last output.
        TimeoutError: a rank hangs, and none has raised.
    """
    context = multiprocessing.get_context("forkserver")
    warm_up()
    pipes = [context.Pipe() for _ in range(ranks)]
    with own_port() as port, tempfile.TemporaryDirectory() as printed:
        environment = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "LOCAL_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu",
        }
        # pytest discards the output of its parallel processes.
        output = printed if "PYTEST_XDIST_WORKER" in os.environ else None
        switches = {"shared_memory": shared_memory, "compiled": compiled, "output": output}
        processes = [
            context.Process(target=run_rank, args=(rank, environment, work, args, sender), kwargs=switches, daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            outcomes = _outcomes([receiver for receiver, _ in pipes], time.monotonic() + timeout, grace)
            return _results(outcomes, processes, Path(printed))
        finally:
            for receiver, _ in pipes:
                receiver.close()
            _end([process for process in processes if process.pid is not None])


def warm_up() -> None:
    """Start the fork server if it does not run. Does not wait for it; it takes ten seconds."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.support.preload"])
    forkserver.ensure_running()


def _end(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.join(2)
        if process.is_alive():
            process.kill()
            process.join()


def _outcomes(receivers: list[Connection], deadline: float, grace: float) -> dict[int, Any]:
    """Return by rank (True, its result), (False, its traceback), or None if it has died. A hanging rank is missing."""
    outcomes: dict[int, Any] = {}
    while waiting := [receiver for rank, receiver in enumerate(receivers) if rank not in outcomes]:
        ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for one in ready:
            rank = receivers.index(cast(Connection, one))
            outcomes[rank] = _outcome(receivers[rank])
            if not outcomes[rank] or not outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + grace)
    return outcomes


def _outcome(receiver: Connection) -> Any:
    try:
        return receiver.recv()
    except EOFError:
        return None


def _results(outcomes: dict[int, Any], processes: Sequence[BaseProcess], printed: Path) -> list[Any]:
    hanging = [rank for rank in range(len(processes)) if rank not in outcomes]
    failures = [
        _death(rank, processes[rank], printed) if outcome is None else str(outcome[1])
        for rank, outcome in sorted(outcomes.items())
        if outcome is None or not outcome[0]
    ]
    if hanging and not failures:
        raise TimeoutError(f"ranks {hanging} hang")
    if failures:
        raise RankError("\n".join(failures + [f"rank {rank} hangs" for rank in hanging]))
    return [outcomes[rank][1] for rank in range(len(processes))]


def _death(rank: int, process: BaseProcess, printed: Path) -> str:
    """Describe the end of a rank that sent no result."""
    process.join(2)
    file = printed / str(rank)
    shown = file.read_text(errors="replace")[-_SHOWN:].strip() if file.exists() else ""
    return f"rank {rank} ended without a result, with exit code {process.exitcode}\n{shown}".rstrip()


def run_rank(
    rank: int,
    environment: dict[str, str],
    work: Callable[..., Any],
    args: tuple[Any, ...],
    result: Connection,
    shared_memory: bool = False,
    compiled: bool = False,
    output: str | None = None,
) -> None:
    """Run `work(rank, *args)` in this process, and send (True, its result) or (False, the traceback) to `result`.

    What it prints goes to a file in the directory `output`, or to the fork server's output if None.
    """
    import deepspeed
    import torch

    # Imported objects are not garbage, so the collector can skip them.
    gc.freeze()
    if output is not None:
        _print_to(Path(output) / str(rank))
    faulthandler.enable(2)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    if not compiled:
        torch.compiler.set_stance("force_eager")
    if not shared_memory:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    try:
        result.send((True, work(rank, *args)))
        # The store of this rank must live while others form groups over it, so all ranks end together.
        result.poll(None)
    except BaseException:
        result.send((False, f"rank {rank}:\n{traceback.format_exc()}"))


def _print_to(path: Path) -> None:
    """Write the output of this process to `path`."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _end_with_parent() -> None:
    """End this process with its parent. Otherwise, a rank that waits for others would outlive killed tests."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.write(2, b"the process that started this rank has ended\n")
        os._exit(1)
