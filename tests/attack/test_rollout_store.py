"""Ten thousand hostile requests to a server of a store, while an honest client continues."""

import contextlib
import os
import random
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path

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
