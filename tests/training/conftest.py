"""Ranks as forked processes, for what needs DeepSpeed."""

import multiprocessing
import os
import socket
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest


@pytest.fixture
def run_ranks() -> Callable[..., list[Any]]:
    return _run_ranks


def _run_ranks(world_size: int, action: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Results of `action(*arguments)` by rank, each in its own process with torch.distributed running."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    started = []
    for rank in range(world_size):
        ours, theirs = fork.Pipe()
        process = fork.Process(target=_rank, args=(theirs, rank, world_size, port, action, arguments))
        process.start()
        theirs.close()
        started.append((process, ours))
    results = [_receive(ours) for _, ours in started]
    for process, _ in started:
        process.join(10)
        if process.is_alive():
            process.kill()
    failed = [result for result in results if isinstance(result, Exception)]
    if failed:
        raise ExceptionGroup("ranks failed", failed)
    return results


def _receive(connection: Connection) -> Any:
    try:
        return connection.recv() if connection.poll(200) else TimeoutError("a rank gave no answer in 200 s")
    except EOFError:
        return RuntimeError("a rank ended without an answer")


def _rank(
    answer: Connection, rank: int, world_size: int, port: int, action: Callable[..., Any], arguments: Any
) -> None:
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in values.items()} | {"MASTER_ADDR": "127.0.0.1"})
    import deepspeed
    import torch

    from deepspeed_compress.training.main import FOREIGN_WARNINGS

    torch.set_num_threads(1)
    for message, category in FOREIGN_WARNINGS:
        warnings.filterwarnings("ignore", message, category)
    try:
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        answer.send(action(*arguments))
    except Exception as error:
        answer.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))
    finally:
        answer.close()
        os._exit(0)
