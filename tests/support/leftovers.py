"""Removal of shared memory: DeepSpeed leaves 66 MiB per rank on the machine after a job."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """Yield a port for the store of a job. The shared memory with its number is removed afterwards."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        # Nobody else gets a bound port, but torch's store, which has the same option, may listen on it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(held.getsockname()[1])
        try:
            yield port
        finally:
            for leftover in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
                leftover.unlink(missing_ok=True)
