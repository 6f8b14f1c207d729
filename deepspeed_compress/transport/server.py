"""Server side: a selector for unauthenticated connections, and a thread for each authenticated one."""

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deepspeed_compress.transport.channel import Channel, keep_alive
from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import ConnectionClosedError, OtherServiceError
from deepspeed_compress.transport.frames import DEFAULT_LIMITS, Limits
from deepspeed_compress.transport.handshake import server_steps
from deepspeed_compress.transport.pending import PendingConnection, PendingConnections, PendingLimits
from deepspeed_compress.transport.rate_limited_log import RateLimitedLog, ignore

_CHECK_INTERVAL = 0.2
"""Seconds between checks for unauthenticated connections whose deadline has passed."""
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors that last until descriptors or memory are free again."""
ACCEPT_PAUSE = 0.1
"""Seconds without new connections after such an error."""
_SHUTDOWN_TIMEOUT = 1.0
"""Maximum number of seconds that a server waits at its end for threads whose connections it has ended."""


@dataclass(frozen=True)
class Bounds:
    """Bounds on the connections of a server.

    Attributes:
        connections: Largest number of authenticated connections. A client above that gets ServerBusyError.
        pending: Limits of unauthenticated connections.
        silence: Seconds without a sign of the other host; the kernel ends a connection after three times as many.
    """

    connections: int = 1024
    pending: PendingLimits = field(default_factory=PendingLimits)
    silence: float = 10.0


DEFAULT_BOUNDS = Bounds()
"""Default bounds: as many connections as a large job has hosts."""


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
        self._threads: dict[Connection, threading.Thread] = {}
        self._change = threading.Condition()

    def run(self, ready: Callable[[], None] = lambda: None, ending: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`, and close the server at the end.

        Args:
            ready: called when clients can connect.
            ending: called at the end, before connections are ended, for example to flush their queues.
        """
        with selectors.DefaultSelector() as selector:
            pending = PendingConnections(selector, self._bounds.pending)
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            try:
                ready()
                while self._drain is None:
                    for key, _ in selector.select(_CHECK_INTERVAL):
                        if key.data is not None:
                            self._step(key.data, pending)
                        elif key.fileobj is self._listener:
                            self._accept(pending)
                    pending.drop_late(time.monotonic())
            finally:
                pending.drop_all()
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

    @property
    def connections(self) -> int:
        """Return the number of authenticated connections."""
        return len(self._threads)

    def _accept(self, pending: PendingConnections) -> None:
        try:
            connected, address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._log(f"a connection could not be accepted ({error})")
            if error.errno in EXHAUSTED:
                pending.drop_one()
                time.sleep(ACCEPT_PAUSE)
            return
        try:
            one = self._prepare(connected, str(address[0]), pending.deadline())
        except OSError:
            connected.close()
            return
        pending.add(one)

    def _prepare(self, connected: socket.socket, address: str, deadline: float) -> PendingConnection:
        connected.setblocking(False)
        keep_alive(connected, self._bounds.silence)
        tls = self._credentials.tls
        if tls is not None:
            connected = tls.server.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
        steps = server_steps(self._credentials.secret.key, self._service, self._has_room)
        return PendingConnection(connected, address, steps, deadline)

    def _has_room(self) -> bool:
        return len(self._threads) < self._bounds.connections

    def _step(self, one: PendingConnection, pending: PendingConnections) -> None:
        if one not in pending:
            # It was dropped by an earlier event of this iteration.
            return
        try:
            event = one.step()
        except OSError as error:
            self._refuse(one, error)
            pending.drop(one)
            return
        if event is not None:
            pending.wait_for(one, event)
            return
        pending.release(one)
        self._start(Connection(Channel(one.socket), self._limits, one.address))

    def _refuse(self, one: PendingConnection, error: OSError) -> None:
        source = self._credentials.secret.source
        if not isinstance(error, OtherServiceError):
            self._log(f"refused a connection from {one.address}: {error} (the secret of this server is from {source})")

    def _start(self, connection: Connection) -> None:
        thread = threading.Thread(target=self._run_service, args=(connection,), daemon=True)
        with self._change:
            self._threads[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:
            self._log(f"a connection from {connection.peer} was closed: {error}")
            self._forget(connection)

    def _run_service(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except ConnectionClosedError:
            pass
        except Exception as error:
            if self._drain is None:
                # An error that one client causes ends only this client's connection.
                self._log(f"a connection from {connection.peer} was closed: {type(error).__name__}: {error}")
        finally:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        connection.close()
        with self._change:
            self._threads.pop(connection, None)
            self._change.notify_all()

    def _end_connections(self) -> None:
        """Wait while connections may continue, then end the rest without waiting for their answers."""
        with self._change:
            self._change.wait_for(lambda: not self._threads, self._drain or 0.0)
            left = list(self._threads)
        for connection in left:
            connection.end()
        with self._change:
            self._change.wait_for(lambda: not self._threads, _SHUTDOWN_TIMEOUT)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening, non-blocking socket. `host` "" listens at all addresses, including IPv6 if available."""
    if not host:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listening = socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    else:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except socket.gaierror as error:
            raise OSError(f"the host {host!r} to listen at has no address ({error.strerror})") from error
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    listening.setblocking(False)
    return listening


_BACKLOG = 1024
