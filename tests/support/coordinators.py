"""Servers of islands in threads, and forked ranks that act as islands."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from deepspeed_compress.local_sgd.coordinator.coordinator import StateFile, island_server
from deepspeed_compress.local_sgd.parameter_server.server import Server as ParameterServer
from deepspeed_compress.local_sgd.parameter_server.snapshot import Snapshot
from tests.support.leftovers import own_port
from tests.support.transport import running

serving = running
"""Context in which a server of islands runs in a thread."""


@contextlib.contextmanager
def coordinator(state: Path | None = None, port: int = 0) -> Iterator[str]:
    """Run a coordinator, and yield its address, "host:port"."""
    server = island_server(StateFile(state) if state is not None else None, "127.0.0.1", port)
    with serving(server):
        yield f"127.0.0.1:{server.port}"


@contextlib.contextmanager
def parameter_server(state: Path | None = None, port: int = 0) -> Iterator[ParameterServer]:
    """Run a parameter server, and yield it."""
    server = ParameterServer(Snapshot(state) if state is not None else None, "127.0.0.1", port)
    with serving(server):
        yield server


@contextlib.contextmanager
def own_ports(count: int) -> Iterator[list[int]]:
    """Yield a port for each of `count` jobs."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(own_port()) for _ in range(count)]


def become_island(rank: int, size: int, ports: list[int]) -> int:
    """Make this forked rank part of an island of `size` ranks, which is a separate job, and return its rank there."""
    os.environ |= {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "LOCAL_SIZE": str(size),
        "RANK": str(rank % size),
        "LOCAL_RANK": str(rank % size),
        "MASTER_PORT": str(ports[rank // size]),
    }
    return rank % size
