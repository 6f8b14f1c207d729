"""Access to an anchor, its order, and the checks of an island that joins."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from deepspeed_compress.local_sgd.anchors import ANCHOR, TRANSFERS, AnchorServer, VersionedAnchor, fetch_anchor
from deepspeed_compress.transport.client import connect, parse_address
from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.credentials import Credentials, Secret
from deepspeed_compress.transport.errors import AuthenticationError
from deepspeed_compress.transport.limits import Limits
from deepspeed_compress.transport.server import Server

NUMEL = 700
SIZES = {"anchor": NUMEL, "outer_momentum": NUMEL}
OWN = Credentials(Secret(b"a secret of islands of the tests", "the tests"))
OTHER = Credentials(Secret(b"another secret of other islands", "the tests"))


def handed(version: int, numel: int = NUMEL) -> VersionedAnchor:
    return max(version, 1), {"run": "mine", "step": 3}, {name: torch.arange(float(numel)) for name in SIZES}


@contextlib.contextmanager
def handing_out(
    copy: Callable[[int], VersionedAnchor | None] = handed, transfers: int = TRANSFERS, timeout: float = 60.0
) -> Iterator[str]:
    """Yield the address of a rank that serves an anchor."""
    server = AnchorServer("127.0.0.1", copy, timeout, OWN, transfers)
    try:
        yield server.address
    finally:
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < 20, "the end waits for others"


@contextlib.contextmanager
def listening(head: Mapping[str, Any], body: bytes) -> Iterator[str]:
    """Yield the address of another service that knows the secret and gives a fixed answer."""

    def serve(connection: Connection) -> None:
        connection.receive(5)
        connection.send(head, body)

    server = Server(ANCHOR, serve, "127.0.0.1", 0, OWN)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.port}"
    server.stop()
    thread.join(5)


RIGHT = {"kind": ANCHOR, "version": 9, "about": {"run": "mine"}, "sizes": SIZES}


def test_an_anchor_arrives_bit_for_bit() -> None:
    with handing_out() as address:
        version, about, tensors = fetch_anchor(address, 4, 5.0, SIZES, "mine", OWN)
    assert (version, about) == (4, {"run": "mine", "step": 3})
    assert all(torch.equal(one, torch.arange(float(NUMEL))) for one in tensors.values())


@pytest.mark.parametrize(
    ("more", "size"),
    [
        ({"about": {"run": "other"}}, 8 * NUMEL),
        ({"about": {}}, 8 * NUMEL),
        ({"about": 3}, 0),
        ({"sizes": {"anchor": 1 << 60}}, 0),
        ({"sizes": 3}, 0),
        ({"version": 0}, 8 * NUMEL),
        ({"version": True}, 8 * NUMEL),
        ({"version": "9"}, 8 * NUMEL),
        ({"kind": "none"}, 0),
        ({"kind": "other"}, 0),
        ({}, 8 * NUMEL - 4),
        ({}, 8 * NUMEL + 4),
    ],
)
def test_another_service_at_the_address_gives_no_anchor(more: Mapping[str, Any], size: int) -> None:
    with listening({**RIGHT, **more}, bytes(size)) as address, pytest.raises(OSError, match=r"\w"):
        fetch_anchor(address, 1, 5.0, SIZES, "mine", OWN)


def test_an_unauthenticated_client_gets_no_anchor_and_no_copy_is_made() -> None:
    asked: list[int] = []
    with handing_out(lambda version: asked.append(version) or handed(version)) as address:
        with pytest.raises(AuthenticationError, match="a different secret"):
            fetch_anchor(address, 1, 5.0, SIZES, "mine", OTHER)
        with socket.create_connection(parse_address(address), timeout=5) as there:
            there.sendall(b'{"version": 1}\n' + bytes(100))
            received = b""
            with contextlib.suppress(ConnectionResetError):
                received = there.recv(1000)
            assert b"run" not in received
    assert asked == []


@pytest.mark.parametrize(
    "head", [{}, {"version": -1}, {"version": True}, {"version": "1"}, {"version": 1, "timeout": "x"}]
)
def test_a_malformed_request_gets_no_anchor(head: Mapping[str, Any]) -> None:
    with handing_out() as address, connect(address, ANCHOR, OWN, limits=Limits(body=1 << 20)) as connection:
        connection.send({"kind": ANCHOR, **head})
        with pytest.raises(ConnectionError):
            connection.receive(5)


def test_islands_that_join_together_take_turns() -> None:
    """One client does not read and occupies one of two turns. All others are served in the other turn."""
    with handing_out(lambda version: handed(version, 1 << 21), transfers=2) as address:
        limits, sizes = Limits(body=1 << 26), dict.fromkeys(SIZES, 1 << 21)
        with connect(address, ANCHOR, OWN, limits=limits) as silent, ThreadPoolExecutor(6) as pool:
            silent.send({"kind": ANCHOR, "version": 1})
            assert silent.receive(5)
            found = pool.map(lambda _: fetch_anchor(address, 1, 60.0, sizes, "mine", OWN), range(6))
            assert all(tensors["anchor"][-1] == (1 << 21) - 1 for _, _, tensors in found)


def test_an_island_learns_that_too_many_join() -> None:
    with handing_out(lambda version: handed(version, 1 << 21), transfers=1, timeout=20.0) as address:
        with connect(address, ANCHOR, OWN, limits=Limits(body=1 << 26)) as silent:
            silent.send({"kind": ANCHOR, "version": 1})
            assert silent.receive(5)
            with pytest.raises(ConnectionError, match="is busy"):
                fetch_anchor(address, 1, 2.0, dict.fromkeys(SIZES, 1 << 21), "mine", OWN)
        # The turn is free again.
        assert fetch_anchor(address, 1, 20.0, dict.fromkeys(SIZES, 1 << 21), "mine", OWN)[0] == 1
