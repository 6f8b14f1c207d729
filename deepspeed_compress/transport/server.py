"""Server side: a thread for each connection, of which few may be unauthenticated, and for a short time."""

import contextlib
import errno
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from deepspeed_compress.transport.channel import Channel, keep_alive
from deepspeed_compress.transport.connection import DEFAULT_LIMITS, Connection, Limits
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import ConnectionClosedError, OtherServiceError
from deepspeed_compress.transport.handshake import HELLO, follow, server_steps

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors that last until descriptors or memory are free again."""
_ACCEPT_PAUSE = 0.1
"""Seconds without new connections after such an error."""
_SHUTDOWN_TIMEOUT = 1.0
"""Maximum number of seconds that a server waits at its end for threads whose connections it has ended."""


@dataclass(frozen=True)
class Bounds:
    """Bounds on the connections of a server.

    Attributes:
        connections: Largest number of authenticated connections. A client above that gets ServerBusyError.
        pending: Largest number of unauthenticated connections.
        patience: Seconds for a connection to authenticate.
    """

    connections: int = 1024
    pending: int = 128
    patience: float = 5.0


DEFAULT_BOUNDS = Bounds()
"""As many connections as a large job has hosts."""


def ignore(text: str) -> None:
    """Discard the line."""


class RateLimitedLog:
    """Log about other processes, which a flood of connections must not fill.

    It passes at most one line per `every` seconds to `log`. The next line reports how many were omitted.
    """

    def __init__(self, log: Callable[[str], None], every: float = 5.0) -> None:
        self._log, self._every = log, every
        self._lock = threading.Lock()
        self._next, self._omitted = 0.0, 0

    def __call__(self, text: str) -> None:
        """Log `text`, or count it as omitted."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._omitted += 1
                return
            more = f" ({self._omitted} more since the last line)" if self._omitted else ""
            self._next, self._omitted = now + self._every, 0
        self._log(text + more)


class _Crowd:
    """Unauthenticated connections of a server, at most `count`.

    If there are more, one from the address that has most of them is ended: the oldest one that has not sent a hello, or
    else the oldest. So a flooder displaces its own connections. If new ones were refused, it could lock out everybody
    else.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._addresses: dict[Channel, str] = {}
        self._lock = threading.Lock()

    def add(self, channel: Channel, address: str) -> None:
        """Add a connection, and make room for it first."""
        while len(self._addresses) >= self._count:
            self.end_one()
        with self._lock:
            self._addresses[channel] = address

    def release(self, channel: Channel) -> None:
        """Remove a connection, which stays open."""
        with self._lock:
            self._addresses.pop(channel, None)

    def end_one(self) -> None:
        """Make room for another connection. Do nothing if there is none to end."""
        with self._lock:
            for address, _ in Counter(self._addresses.values()).most_common(1):
                found = [channel for channel, other in self._addresses.items() if other == address]
                chosen = next((channel for channel in found if channel.received < HELLO.size), found[0])
                del self._addresses[chosen]
                # Its thread may not run for long, and its descriptor is needed at once.
                chosen.close()


class Server:
    """Server that listens at `host`:`port` from its construction, and serves while `run` runs.

    Args:
        service: name of the service, at most 22 bytes. A client of another service gets OtherServiceError.
        serve: called with each authenticated connection, in its own thread. The connection is closed when it returns or
            raises; its errors end nothing else.
        host: address to listen at; "" for all.
        port: port to listen at; 0 selects a free one. The attribute `port` has the selected one.
        credentials: credentials of this side.
        limits: limits of what clients may send; `Connection.limits` may be set for one of them.
        bounds: bounds on the number of connections.
        log: receives log lines about failed connections, at a limited rate.

    Raises:
        OSError: if the address is not available.
    """

    def __init__(
        self,
        service: str,
        serve: Callable[[Connection], None],
        host: str,
        port: int,
        credentials: Credentials,
        limits: Limits = DEFAULT_LIMITS,
        bounds: Bounds = DEFAULT_BOUNDS,
        log: Callable[[str], None] = ignore,
    ) -> None:
        self._service, self._serve, self._credentials = service, serve, credentials
        self._limits, self._bounds, self._log = limits, bounds, RateLimitedLog(log)
        self._listener = listen(host, port)
        self.port = int(self._listener.getsockname()[1])
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._drain: float | None = None
        self._crowd = _Crowd(bounds.pending)
        self._threads: dict[Channel, threading.Thread] = {}
        self._admitted: set[Channel] = set()
        """Authenticated connections."""
        self._change = threading.Condition()

    def run(self, ready: Callable[[], None] = lambda: None, ending: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`, and close the server at the end.

        Args:
            ready: called when clients can connect.
            ending: called at the end, before connections are ended, for example to flush their queues.
        """
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        try:
            ready()
            while self._drain is None:
                poll.poll()
                self._accept()
        finally:
            self.close()
            ending()
            self._end_connections()

    def stop(self, drain: float = 0.0) -> None:
        """End `run`. It may be called from any thread or signal handler, and does not wait.

        Args:
            drain: seconds for which authenticated connections may continue. New ones are refused.
        """
        self._drain = drain
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def close(self) -> None:
        """Close the sockets of a server that does not run here, such as the copy that a fork has left behind."""
        for one in (self._listener, self._waker, self._woken):
            one.close()

    @property
    def descriptors(self) -> set[int]:
        """Return the descriptors that a forked process must keep if the server is to run in it."""
        return {one.fileno() for one in (self._listener, self._waker, self._woken)}

    def _accept(self) -> None:
        try:
            connected, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._log(f"a connection could not be accepted ({error})")
            if error.errno in _EXHAUSTED:
                self._crowd.end_one()
                time.sleep(_ACCEPT_PAUSE)
            return
        channel, peer = Channel(connected), str(address[0])
        self._crowd.add(channel, peer)
        thread = threading.Thread(target=self._attend, args=(channel, peer), daemon=True)
        with self._change:
            self._threads[channel] = thread
        try:
            thread.start()
        except RuntimeError as error:
            self._log(f"a connection from {peer} was closed: {error}")
            self._forget(channel)

    def _attend(self, channel: Channel, peer: str) -> None:
        """Serve one connection until it ends. An error that one client causes ends only this client's connection."""
        is_authenticated = False
        try:
            self._authenticate(channel)
            is_authenticated = True
            self._crowd.release(channel)
            self._serve(Connection(channel, self._limits, peer))
        except (ConnectionClosedError, OtherServiceError):
            pass
        except Exception as error:
            if is_authenticated and self._drain is None:
                self._log(f"a connection from {peer} was closed: {type(error).__name__}: {error}")
            elif self._drain is None:
                source = self._credentials.secret.source
                self._log(f"refused a connection from {peer}: {error} (the secret of this server is from {source})")
        finally:
            self._forget(channel)

    def _authenticate(self, channel: Channel) -> None:
        deadline = time.monotonic() + self._bounds.patience
        keep_alive(channel.socket)
        if self._credentials.tls is not None:
            channel.start_tls(self._credentials.tls.server, deadline)
        follow(
            server_steps(self._credentials.secret.key, self._service, partial(self._admit, channel)), channel, deadline
        )

    def _admit(self, channel: Channel) -> bool:
        """Count `channel` as authenticated, if there is room."""
        with self._change:
            if len(self._admitted) < self._bounds.connections:
                self._admitted.add(channel)
            return channel in self._admitted

    def _forget(self, channel: Channel) -> None:
        self._crowd.release(channel)
        channel.close()
        with self._change:
            self._threads.pop(channel, None)
            self._admitted.discard(channel)
            self._change.notify_all()

    def _end_connections(self) -> None:
        """Wait while authenticated connections may continue, then end all without waiting for their answers."""
        with self._change:
            self._change.wait_for(lambda: not self._admitted, self._drain or 0.0)
            left = list(self._threads)
        for channel in left:
            channel.end()
        with self._change:
            self._change.wait_for(lambda: not self._threads, _SHUTDOWN_TIMEOUT)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening, non-blocking socket. `host` "" listens at all addresses, including IPv6 if available."""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    listening.setblocking(False)
    return listening


_BACKLOG = 1024
