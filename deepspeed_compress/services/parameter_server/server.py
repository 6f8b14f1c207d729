"""The process of a parameter server: connections of ranks."""

import contextlib
import select
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from deepspeed_compress.services.parameter_server.frames import receive, send
from deepspeed_compress.services.parameter_server.push_log import PushLog
from deepspeed_compress.services.parameter_server.service import DEFAULT_ROOM, Room, Service

__all__ = ["Server", "keep_alive"]

CHECK = 10
"""Seconds of silence after which the kernel asks whether the other side is there."""
LONGEST_SILENCE = 2**15 - 1
"""Seconds: Linux takes no more."""


class Server:
    """Serves a `Service` at `host`:`port`, 0 for a free one. `told` gets a line for people now and then."""

    def __init__(
        self,
        log: PushLog | None,
        host: str,
        port: int,
        told: Callable[[str], None] = lambda text: None,
        room: Room = DEFAULT_ROOM,
    ) -> None:
        self.service = Service(log, told, room)
        self._tcp = _Tcp((host, port), _Connection)
        self._tcp.owner = self.service
        self.port = int(self._tcp.server_address[1])

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Until `stop`. `ready` is called when islands can connect."""
        ready()
        try:
            self._tcp.serve_forever(0.1)
        finally:
            self._tcp.server_close()
            self._tcp.hang_up()
            self.service.close()

    def stop(self) -> None:
        """From any thread but that of `run`, and from a signal."""
        threading.Thread(target=self._tcp.shutdown, daemon=True).start()


def keep_alive(there: socket.socket, silence: float) -> None:
    """The kernel ends a connection whose other side has not been there for about three times `silence` seconds."""
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, option):
            there.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), min(max(1, round(silence)), LONGEST_SILENCE))
    if hasattr(socket, "TCP_KEEPCNT"):
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(max(1, round(3000 * silence)), 2**31 - 1))


class _Tcp(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    block_on_close = False
    owner: Service

    def __init__(self, *args: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Connection(socketserver.StreamRequestHandler):
    """Of one rank, until it ends. What is no call ends it."""

    server: _Tcp
    wbufsize = 1 << 16

    def handle(self) -> None:
        keep_alive(self.request, CHECK)
        try:
            with contextlib.suppress(OSError, EOFError, ValueError, RecursionError):
                while (found := receive(self.rfile)) is not None:
                    send(self.wfile, *self.server.owner.hear(*found, self))
        finally:
            self.server.owner.gone(self)

    def finish(self) -> None:
        # Who asked may be gone.
        with contextlib.suppress(OSError):
            super().finish()

    def has_hung_up(self) -> bool:
        """Return whether the other side has closed the connection, while it waits for an answer."""
        ready, _, _ = select.select([self.request], [], [], 0)
        try:
            return bool(ready) and not self.request.recv(1, socket.MSG_PEEK)
        except OSError:
            return True
