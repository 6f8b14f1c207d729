"""Hostile messages and idle connections to a server of a store, while an honest client continues."""

import contextlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import IO

import pytest

from deepspeed_compress.rollout import DirectoryStore
from deepspeed_compress.rollout.served_store import LIMITS, STORE, ServedStore, StoreServer
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import Connection, encode
from tests.support.hostile import COUNTS, Message, attack_authenticated, attack_unauthenticated, raw_bytes
from tests.support.processes import MEGABYTE, join_threads, resident_memory, start_threads
from tests.support.siege import besieged, drip, medians, serving_process
from tests.support.transport import CREDENTIALS, until


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
        # The server may not have read all that the attack has sent.
        until(lambda: not any(name.endswith(".unfinished") for name in store.names()))
        # "x" is among the values that the attack writes in place of names.
        assert {*store.names()} <= {"blob", "other0", "other1", "other2", "x"}
    assert resident_memory(os.getpid()) - before < 500 * MEGABYTE


SERVE = """
import sys
from pathlib import Path
from deepspeed_compress.rollout import DirectoryStore
from deepspeed_compress.rollout.served_store import StoreServer
from tests.support.transport import CREDENTIALS
with StoreServer(DirectoryStore(Path(sys.argv[1])), "127.0.0.1", 0, CREDENTIALS) as server:
    print(server.port, flush=True)
    sys.stdin.read()
"""
DESCRIPTORS = 256


def served(path: Path, log: IO[bytes]) -> AbstractContextManager[tuple[int, int]]:
    """Run a server in a process with `DESCRIPTORS` descriptors. Yield its process id and its port."""
    return serving_process(SERVE, path, log=log, descriptors=DESCRIPTORS)


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
        crowded: list[float] = []
        with besieged(port, [drip(b"DSCOMPR")] * 1000):
            end = time.monotonic() + 4.0
            while time.monotonic() < end:
                crowded.append(seconds_of_a_client(port))
        assert resident_memory(process) < 300 * MEGABYTE
    assert max(crowded) < 1.0 + 4 * calm
    assert (tmp_path / "log").stat().st_size < 4096


def ask(port: int, kind: str, name: str, announced: int = 0) -> Connection:
    """Return a connection of a client with the secret, which sends no body for its request, and reads no answer."""
    there = connect(f"127.0.0.1:{port}", STORE, CREDENTIALS, limits=LIMITS)
    there.send_encoded(encode({"kind": kind, "name": name}, announced))
    return there


@contextlib.contextmanager
def attacked(port: int) -> Iterator[None]:
    """Attack by 256 idle connections, 256 with forged bytes, 32 that read nothing, and 40 abandoned requests."""
    rng = random.Random(4)
    forged = [drip(raw_bytes(rng)) for _ in range(256)]
    with contextlib.ExitStack() as unread:
        for _ in range(32):
            unread.enter_context(ask(port, "get", "large"))
        for _ in range(20):
            ask(port, "get", "large").close()
            ask(port, "put", "abandoned", announced=1 << 20).close()
        with besieged(port, [[]] * 256 + forged):
            yield


@pytest.mark.serial
def test_a_client_waits_at_most_twice_as_long_while_a_store_is_attacked(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, served(tmp_path / "store", log) as (process, port):
        with closing(ServedStore(f"tcp://127.0.0.1:{port}", CREDENTIALS)) as store:
            store.put("large", bytes(32 * MEGABYTE))
        before = resident_memory(process)
        alone, under = medians(lambda: seconds_of_a_client(port), lambda: attacked(port))
        # See docs/security.md.
        assert resident_memory(process) - before < 100 * MEGABYTE
        with closing(ServedStore(f"tcp://127.0.0.1:{port}", CREDENTIALS)) as store:
            assert {*store.names()} == {"blob", "large"}
    assert under <= 2 * alone


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
