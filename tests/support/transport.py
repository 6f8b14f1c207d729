"""Servers of the transport in threads, connections to them, and certificates."""

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import DEFAULT_LIMITS, Connection, Limits
from deepspeed_compress.transport.credentials import Credentials, Secret
from deepspeed_compress.transport.server import DEFAULT_BOUNDS, Bounds, Server

T = TypeVar("T")
SERVICE = "echo"
CREDENTIALS = Credentials(Secret(b"a secret of the tests of the transport", "the tests"))


def echo(connection: Connection) -> None:
    """Answer every frame with itself, until the connection ends."""
    while True:
        head = connection.receive()
        assert head is not None
        connection.send(head, connection.read_body())


@contextlib.contextmanager
def serving(
    serve: Callable[[Connection], None] = echo,
    credentials: Credentials = CREDENTIALS,
    limits: Limits = DEFAULT_LIMITS,
    bounds: Bounds = DEFAULT_BOUNDS,
    log: Callable[[str], None] = lambda text: None,
) -> Iterator[Server]:
    """Run a server in a thread. At the end, it must stop long before the patience with its clients is over."""
    server = Server(SERVICE, serve, "127.0.0.1", 0, credentials, limits, bounds, log)
    with running(server, DEFAULT_LIMITS.patience / 3):
        yield server


@contextlib.contextmanager
def running(server: Any, seconds: float = 60.0) -> Iterator[None]:
    """Run `server` in a thread. At the end, it must stop within `seconds`."""
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), daemon=True)
    thread.start()
    assert ready.wait(120), "the server does not start"
    try:
        yield
    finally:
        server.stop()
        thread.join(seconds)
        assert not thread.is_alive(), "the server does not stop in time"


def connected(
    server: Server, credentials: Credentials = CREDENTIALS, limits: Limits = DEFAULT_LIMITS, timeout: float = 5.0
) -> Connection:
    return connect(f"127.0.0.1:{server.port}", SERVICE, credentials, timeout, limits)


def unauthenticated(server: Server) -> socket.socket:
    """Return an unauthenticated connection."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def until(find: Callable[[], T], seconds: float = 120.0) -> T:
    """Wait until `find` returns a true value, and return that. The limit is for a hang, on a busy machine."""
    deadline = time.monotonic() + seconds
    while not (found := find()):
        assert time.monotonic() < deadline, f"the condition was not met within {seconds} s"
        time.sleep(0.01)
    return found


def make_certificates(directory: Path) -> dict[str, str]:
    """Return paths of PEM files by name: two authorities, and a certificate with its key signed by each."""
    found = {}
    for authority, member in (("authority", "member"), ("other_authority", "stranger")):
        ca, key = directory / f"{authority}.pem", directory / f"{authority}.key"
        _openssl("req", "-x509", *_NEW, "-keyout", key, "-out", ca, "-subj", f"/CN={authority}", "-days", "2")
        signed, own, request = (directory / f"{member}.{end}" for end in ("crt", "key", "csr"))
        _openssl("req", *_NEW, "-keyout", own, "-out", request, "-subj", f"/CN={member}")
        signing = ("-CA", ca, "-CAkey", key, "-CAcreateserial", "-days", "2")
        _openssl("x509", "-req", "-in", request, "-out", signed, *signing)
        both = directory / f"{member}.pem"
        both.write_text(signed.read_text() + own.read_text())
        found |= {authority: str(ca), member: str(both)}
    return found


_NEW = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)
