"""Hostile requests and idle connections to a server of a store, while an honest client continues."""

import contextlib
import os
import random
import re
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from deepspeed_compress.rollout import DirectoryStore
from deepspeed_compress.rollout.served_store import ServedStore
from deepspeed_compress.rollout.signatures import Stamp
from deepspeed_compress.rollout.store_server import StoreServer
from tests.support.hostile import COUNTS, attack_unauthenticated, raw_bytes
from tests.support.processes import MEGABYTE, join_threads, resident_memory, start_threads
from tests.support.transport import CREDENTIALS

NAMES = ["blob", "", "../blob", "a" * 5000, "%00", "other", "BLOB"]


def request(rng: random.Random) -> bytes:
    """Return a request of HTTP whose signature, name, length or body is wrong, or that ends early."""
    method, name = rng.choice(["GET", "PUT", "DELETE", "POST", "X" * 300]), rng.choice(NAMES)
    body = rng.randbytes(rng.randrange(100))
    stamp = replace(Stamp.new(method, name, b"another body"), time=rng.choice([0, 10**11]))
    key = rng.choice([CREDENTIALS.secret.key, b"another secret"])
    headers = [f"{name}: {value}" for name, value in stamp.headers(key).items()]
    length = rng.choice([len(body), 0, 1 << 40, -1])
    head = "\r\n".join([f"{method} /blobs/{name} HTTP/1.1", "Host: a", f"Content-Length: {length}", *headers, "", ""])
    whole = head.encode() + body
    return whole[: rng.randrange(1, len(whole))] if rng.random() < 0.2 else whole


def attack(port: int, count: int, seed: int) -> None:
    """Send about `count` hostile requests, several per connection, without reading most answers."""
    rng = random.Random(seed)
    for _ in range(count // 10):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as there:
            for _ in range(rng.randrange(1, 20)):
                there.sendall(rng.choice([request, request, raw_bytes])(rng))


@COUNTS
def test_hostile_requests_do_not_disturb_a_store(tmp_path: Path, count: int) -> None:
    server = StoreServer(DirectoryStore(tmp_path), "127.0.0.1", 0, CREDENTIALS)
    before, blob = resident_memory(os.getpid()), bytes(range(256)) * 1000
    with server, closing(ServedStore(f"http://127.0.0.1:{server.port}", CREDENTIALS)) as store:
        store.put("blob", blob)
        threads = start_threads(
            lambda: attack_unauthenticated(f"127.0.0.1:{server.port}", count // 2, 1),
            lambda: attack(server.port, count // 2, 2),
        )
        for _ in range(50):
            assert store.get("blob") == blob
        join_threads(threads)
        assert store.get("blob") == blob
        assert store.names() == ["blob"]
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
    with closing(ServedStore(f"http://127.0.0.1:{port}", CREDENTIALS)) as store:
        store.put("blob", blob)
        assert store.get("blob") == blob
    return time.monotonic() - begun


@pytest.mark.serial
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1"], ids=["idle", "dripping"])
@pytest.mark.parametrize("count", [256, 1000])
def test_connections_without_the_secret_do_not_lock_out_a_client(count: int, sent: bytes, tmp_path: Path) -> None:
    """The server has 256 descriptors."""
    with (tmp_path / "log").open("wb") as log, served(tmp_path / "store", log) as (process, port):
        calm = max(seconds_of_a_client(port) for _ in range(5))
        threads, crowded = start_threads(lambda: crowd(port, count, 6.0, sent)), list[float]()
        time.sleep(0.5)
        while threads[0].is_alive():
            crowded.append(seconds_of_a_client(port))
        join_threads(threads)
        assert resident_memory(process) < 300 * MEGABYTE
    assert max(crowded) < 1.0 + 4 * calm
    assert (tmp_path / "log").stat().st_size < 4096


def get(name: str) -> bytes:
    """Return a signed request for a blob."""
    headers = Stamp.new("GET", name, b"").headers(CREDENTIALS.secret.key)
    lines = [f"GET /blobs/{name} HTTP/1.1", "Host: a", *(f"{key}: {value}" for key, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def slow_reader(stack: contextlib.ExitStack, port: int, request: bytes) -> socket.socket:
    """Return a connection with a small buffer, over which `request` was sent, and whose answer has begun."""
    there = stack.enter_context(socket.socket())
    there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    there.settimeout(60)
    there.connect(("127.0.0.1", port))
    there.sendall(request)
    return there


def test_slow_readers_and_repeated_requests_cost_no_memory(tmp_path: Path) -> None:
    size, recorded = 32 * MEGABYTE, get("blob")
    with (
        (tmp_path / "log").open("wb") as log,
        served(tmp_path / "store", log) as (process, port),
        closing(ServedStore(f"http://127.0.0.1:{port}", CREDENTIALS)) as store,
        contextlib.ExitStack() as readers,
    ):
        DirectoryStore(tmp_path / "store").put("blob", bytes(size))
        store.names()
        before = resident_memory(process)
        for _ in range(64):
            assert b"200 OK" in slow_reader(readers, port, get("blob")).recv(100)
        answers = [slow_reader(readers, port, recorded).recv(100) for _ in range(32)]
        begun = time.monotonic()
        assert len(store.get("blob")) == size
        assert time.monotonic() - begun < 5.0
        assert resident_memory(process) - before < 3 * size
    assert [bool(re.search(rb" 401 ", answer)) for answer in answers] == [False] + 31 * [True]
