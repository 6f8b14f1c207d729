"""Hostile messages and idle connections to a server of a store, while an honest client continues."""

import contextlib
import os
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO

import pytest

from deepspeed_compress.rollout import DirectoryStore
from deepspeed_compress.rollout.served_store import ServedStore
from deepspeed_compress.rollout.store_server import LIMITS, STORE, StoreServer
from deepspeed_compress.transport.client import connect
from tests.support.hostile import COUNTS, Message, attack_authenticated, attack_unauthenticated
from tests.support.processes import MEGABYTE, join_threads, resident_memory, start_threads
from tests.support.transport import CREDENTIALS


def templates(number: int) -> Sequence[Message]:
    return [
        {"kind": "names", "name": ""},
        {"kind": "get", "name": "blob"},
        {"kind": "put", "name": f"other{number % 3}"},
        {"kind": "delete", "name": "other0"},
        {"kind": "get", "name": "../blob"},
    ]


@COUNTS
def test_hostile_messages_do_not_disturb_a_store(tmp_path: Path, count: int) -> None:
    server = StoreServer(DirectoryStore(tmp_path), "127.0.0.1", 0, CREDENTIALS)
    before, blob = resident_memory(os.getpid()), bytes(range(256)) * 1000
    address = f"127.0.0.1:{server.port}"
    with server, closing(ServedStore(f"tcp://{address}", CREDENTIALS)) as store:
        store.put("blob", blob)
        threads = start_threads(
            lambda: attack_unauthenticated(address, count // 2, 1),
            lambda: attack_authenticated(address, STORE, CREDENTIALS, templates, count // 2, 2),
        )
        for _ in range(50):
            assert store.get("blob") == blob
        join_threads(threads)
        assert store.get("blob") == blob
        # "x" is among the values that the attack writes in place of names.
        assert {*store.names()} <= {"blob", "other0", "other1", "other2", "x"}
    assert resident_memory(os.getpid()) - before < 500 * MEGABYTE


SERVE = """
import sys
from pathlib import Path
from deepspeed_compress.rollout import DirectoryStore
from deepspeed_compress.rollout.store_server import StoreServer
from tests.support.transport import CREDENTIALS
with StoreServer(DirectoryStore(Path(sys.argv[1])), "127.0.0.1", 0, CREDENTIALS) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
DESCRIPTORS = 256


@contextlib.contextmanager
def served(path: Path, log: IO[bytes]) -> Iterator[tuple[int, int]]:
    """Run a server in a process with `DESCRIPTORS` descriptors. Yield its process id and its port."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))

    command = [sys.executable, "-c", SERVE, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
    with subprocess.Popen(command, **pipes, preexec_fn=limit, text=True) as process:  # type: ignore[call-overload]
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()


def crowd(port: int, count: int, seconds: float, sent: bytes) -> int:
    """Keep `count` connections open, each of which sends a byte of `sent` now and then. Return how many were opened.

    Those that the server closes are opened again, 500 per second at most.
    """
    until, opened, calm = time.monotonic() + seconds, 0, 0.05
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as sockets:
        while time.monotonic() < until:
            for _ in range(min(25, count - len(selector.get_map()))):
                there = sockets.enter_context(socket.socket())
                there.setblocking(False)
                there.connect_ex(("127.0.0.1", port))
                selector.register(there, selectors.EVENT_READ)
                opened += 1
            for key, _ in selector.select(calm):
                there = key.fileobj  # type: ignore[assignment]
                selector.unregister(there)
                there.close()
            for key in list(selector.get_map().values()):
                with contextlib.suppress(OSError):
                    key.fileobj.send(sent[:1])  # type: ignore[union-attr]
            time.sleep(calm)
    return opened


def seconds_of_a_client(port: int) -> float:
    """Return the seconds that a new client takes to store a blob and to get it, over a connection of its own."""
    begun, blob = time.monotonic(), os.urandom(1 << 20)
    with closing(ServedStore(f"tcp://127.0.0.1:{port}", CREDENTIALS)) as store:
        store.put("blob", blob)
        assert store.get("blob") == blob
    return time.monotonic() - begun


@pytest.mark.serial
def test_connections_without_the_secret_do_not_lock_out_a_client(tmp_path: Path) -> None:
    """The server has 256 descriptors."""
    with (tmp_path / "log").open("wb") as log, served(tmp_path / "store", log) as (process, port):
        calm = max(seconds_of_a_client(port) for _ in range(5))
        threads, crowded = start_threads(lambda: crowd(port, 1000, 6.0, b"DSCOMPR")), list[float]()
        time.sleep(0.5)
        while threads[0].is_alive():
            crowded.append(seconds_of_a_client(port))
        join_threads(threads)
        assert resident_memory(process) < 300 * MEGABYTE
    assert max(crowded) < 1.0 + 4 * calm
    assert (tmp_path / "log").stat().st_size < 4096


def test_slow_readers_cost_no_memory(tmp_path: Path) -> None:
    size = 32 * MEGABYTE
    with (
        (tmp_path / "log").open("wb") as log,
        served(tmp_path / "store", log) as (process, port),
        closing(ServedStore(f"tcp://127.0.0.1:{port}", CREDENTIALS)) as store,
        contextlib.ExitStack() as readers,
    ):
        store.put("blob", bytes(size))
        before = resident_memory(process)
        for _ in range(64):
            there = readers.enter_context(connect(f"127.0.0.1:{port}", STORE, CREDENTIALS, limits=LIMITS))
            there.send({"kind": "get", "name": "blob"})
            assert (there.receive(60) or {})["kind"] == "done"
        begun = time.monotonic()
        assert len(store.get("blob")) == size
        assert time.monotonic() - begun < 5.0
        assert resident_memory(process) - before < size
