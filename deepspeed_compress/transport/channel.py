"""Socket, plain or TLS, whose reads and writes have deadlines, and which any thread can end at once."""

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")
_POLL_INTERVAL = 0.5
"""Seconds between checks for the end of the channel by another thread."""
_HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
_LONGEST_SILENCE = 2**15 - 1
"""Largest number of seconds that Linux accepts for TCP_KEEPIDLE."""


class Channel:
    """Connected socket in non-blocking mode. One thread may read while another one writes.

    OpenSSL does not allow that on one TLS connection, so calls of the socket are made under a lock. Waiting is done
    outside of the lock, with poll(2), which accepts descriptors of any number.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.received = 0
        """Bytes that were read."""
        self._lock = threading.Lock()
        self._ended = False

    def start_tls(self, context: ssl.SSLContext, deadline: float) -> None:
        """Make the TLS handshake of a server. Raises as `read_some`."""
        self.socket = tls = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self._repeat(tls.do_handshake, select.POLLIN, deadline)

    def read_some(self, into: memoryview, deadline: float | None) -> int:
        """Read at least one byte, and return how many; 0 at the end of the stream.

        Args:
            into: memory to read into; not empty.
            deadline: time of time.monotonic(); None waits forever.

        Raises:
            TimeoutError: if nothing arrives before the deadline.
        """
        try:
            count = self._repeat(partial(self.socket.recv_into, into), select.POLLIN, deadline)
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0
        self.received += count
        return count

    def read_all(self, into: memoryview, deadline: float) -> None:
        """Fill `into`. Raises ConnectionResetError at the end of the stream, and otherwise as `read_some`."""
        while into:
            count = self.read_some(into, deadline)
            if not count:
                raise ConnectionResetError("the other side has closed the connection in the middle of a frame")
            into = into[count:]

    def write(self, data: memoryview, deadline: float) -> None:
        """Write all of `data`. Raises TimeoutError if the other side does not read it before the deadline."""
        while data:
            data = data[self._repeat(partial(self.socket.send, data), select.POLLOUT, deadline) :]

    def _repeat(self, call: Callable[[], T], blocked: int, deadline: float | None) -> T:
        """Return the result of `call`, once it neither blocks (which means to wait for `blocked`) nor waits for TLS."""
        while True:
            with self._lock:
                self._check_open()
                try:
                    return call()
                except BlockingIOError:
                    wanted = blocked
                except ssl.SSLWantReadError:
                    wanted = select.POLLIN
                except ssl.SSLWantWriteError:
                    wanted = select.POLLOUT
            self._wait(wanted, deadline)

    def end(self) -> None:
        """End the channel from any thread: reads and writes that wait raise ConnectionAbortedError."""
        with self._lock:
            if not self._ended:
                self._ended = True
                with contextlib.suppress(OSError):
                    # Not SSLSocket.shutdown, which would continue to read without TLS.
                    socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the channel, and free its descriptor, from any thread."""
        self.end()
        with self._lock:
            self.socket.close()

    def has_hung_up(self) -> bool:
        """Return True if either side has closed the connection, even if the other one sent something before."""
        poll = select.poll()
        with self._lock:
            if self._ended:
                return True
            poll.register(self.socket, _HUNG_UP)
            return bool(poll.poll(0))

    def _check_open(self) -> None:
        if self._ended:
            raise ConnectionAbortedError("this side has closed the connection")

    def _wait(self, wanted: int, deadline: float | None) -> None:
        left = _POLL_INTERVAL if deadline is None else min(_POLL_INTERVAL, deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError("the other side did not respond in time")
        poll = select.poll()
        with self._lock:
            self._check_open()
            poll.register(self.socket, wanted)
        poll.poll(left * 1000)


def keep_alive(connected: socket.socket, silence: float = 10.0) -> None:
    """Make the kernel end a connection if the other host is gone for about three times `silence` seconds."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = min(max(1, round(silence)), _LONGEST_SILENCE)
    for option, value in (
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", seconds),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", min(max(1, round(3000 * silence)), 2**31 - 1)),
    ):
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
