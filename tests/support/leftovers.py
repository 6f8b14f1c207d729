"""What a job leaves on the machine, and its removal: DeepSpeed keeps 66 MiB of shared memory a rank for ever."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """A port for the ranks of a job to meet at; what they shared under its number is removed afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    try:
        yield port
    finally:
        for leftover in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
            leftover.unlink(missing_ok=True)
