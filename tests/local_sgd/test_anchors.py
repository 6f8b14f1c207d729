"""Access to an anchor, its order, and the checks of an island that joins."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from deepspeed_compress.local_sgd.anchors import ANCHOR, AnchorServer, VersionedAnchor, fetch_anchor
from deepspeed_compress.transport.client import connect, parse_address
from deepspeed_compress.transport.connection import Connection, Limits
from deepspeed_compress.transport.credentials import SECRET, Credentials
from deepspeed_compress.transport.errors import AuthenticationError
from deepspeed_compress.transport.server import Server

NUMEL = 700
SIZES = {"anchor": NUMEL, "outer_momentum": NUMEL}


def handed(version: int, numel: int = NUMEL) -> VersionedAnchor:
    return max(version, 1), {"run": "mine", "step": 3}, {name: torch.arange(float(numel)) for name in SIZES}


@contextlib.contextmanager
def handing_out(copy: Callable[[int], VersionedAnchor | None] = handed, timeout: float = 60.0) -> Iterator[str]:
    """Yield the address of a rank that serves an anchor."""
    server = AnchorServer("127.0.0.1", copy, timeout)
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

    server = Server(ANCHOR, serve, "127.0.0.1", 0, Credentials.find())
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.port}"
    server.stop()
    thread.join(5)


RIGHT = {"kind": ANCHOR, "version": 9, "about": {"run": "mine"}, "sizes": SIZES}


def test_an_anchor_arrives_bit_for_bit() -> None:
    with handing_out() as address:
        version, about, tensors = fetch_anchor(address, 4, 5.0, SIZES, "mine")
    assert (version, about) == (4, {"run": "mine", "step": 3})
    assert all(torch.equal(tensor, torch.arange(float(NUMEL))) for tensor in tensors.values())


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
        fetch_anchor(address, 1, 5.0, SIZES, "mine")


def test_an_unauthenticated_client_gets_no_anchor_and_no_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    with handing_out(lambda version: asked.append(version) or handed(version)) as address:
        monkeypatch.setenv(SECRET, "another secret of other islands")
        with pytest.raises(AuthenticationError, match="a different secret"):
            fetch_anchor(address, 1, 5.0, SIZES, "mine")
        monkeypatch.undo()
        with socket.create_connection(parse_address(address), timeout=5) as there:
            there.sendall(b'{"version": 1}\n' + bytes(100))
            received = b""
            with contextlib.suppress(ConnectionResetError):
                received = there.recv(1000)
            assert b"run" not in received
    assert asked == []


@pytest.mark.parametrize("head", [{}, {"version": -1}, {"version": True}, {"version": "1"}])
def test_a_malformed_request_gets_no_anchor(head: Mapping[str, Any]) -> None:
    with (
        handing_out() as address,
        connect(address, ANCHOR, Credentials.find(), limits=Limits(body=1 << 20)) as connection,
    ):
        connection.send({"kind": ANCHOR, **head})
        with pytest.raises(ConnectionError):
            connection.receive(5)
