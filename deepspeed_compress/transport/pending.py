"""Unauthenticated connections, which cost a socket and a few hundred bytes each, and no thread."""

import selectors
import socket
import ssl
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from deepspeed_compress.transport.handshake import Steps


@dataclass(frozen=True)
class PendingLimits:
    """Largest number of unauthenticated connections, and seconds for each to authenticate."""

    count: int = 128
    patience: float = 5.0


class PendingConnection:
    """Connection during TLS and the handshake. Call `step` whenever its socket is ready."""

    def __init__(self, connected: socket.socket, address: str, steps: Steps, deadline: float) -> None:
        self.socket, self.address, self.deadline = connected, address, deadline
        self._steps, self._step = steps, next(steps)
        self.has_greeted = False
        """True if the client has sent a complete hello of this protocol."""
        self._received = bytearray()
        self._tls = connected if isinstance(connected, ssl.SSLSocket) else None

    def step(self) -> int | None:
        """Advance as far as possible. Return the event of `selectors` to wait for; None if the handshake is over.

        Raises:
            OSError: if the handshake has failed.
        """
        try:
            if self._tls is not None:
                self._tls.do_handshake()
                self._tls = None
            while self._read():
                pass
        except (BlockingIOError, ssl.SSLWantReadError):
            return selectors.EVENT_READ
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        return None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _read(self) -> bool:
        """Read the bytes that the current step needs, and begin the next one. Return False if there is none."""
        data = self.socket.recv(self._step.wanted - len(self._received))
        if not data:
            raise ConnectionError("the client closed the connection before it authenticated")
        self._received += data
        if len(self._received) == self._step.wanted:
            self._step = self._steps.send(bytes(self._received))
            self.has_greeted = True
            self._received.clear()
            # A few bytes always fit into an empty socket buffer.
            self.socket.send(self._step.out)
        if self._step.wanted:
            return True
        # The error that this raises is the reason that the other side has just received.
        next(self._steps, None)
        return False


class Waiting(Protocol):
    """Unauthenticated connection.

    Attributes:
        address: address of the client.
        has_greeted: True if the client has sent a complete hello of this protocol.
    """

    address: str
    has_greeted: bool

    def close(self) -> None:
        """Close the connection."""


Connection = TypeVar("Connection", bound=Waiting)


class Crowd(Generic[Connection]):
    """Unauthenticated connections of a server, at most `count`.

    If there are more, one from the address that has most of them is closed: the oldest one that has not sent a hello,
    or else the oldest. So a flooder displaces its own connections. If new ones were refused, it could lock out
    everybody else.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._connections: OrderedDict[Connection, None] = OrderedDict()
        self._of_address: Counter[str] = Counter()

    def __contains__(self, connection: object) -> bool:
        return connection in self._connections

    def add(self, connection: Connection) -> None:
        """Add `connection`, and make room for it first."""
        while len(self._connections) >= self._count:
            self.drop_one()
        self._connections[connection] = None
        self._of_address[connection.address] += 1

    def release(self, connection: Connection) -> None:
        """Remove `connection`, which stays open."""
        del self._connections[connection]
        self._of_address[connection.address] -= 1
        if not self._of_address[connection.address]:
            del self._of_address[connection.address]

    def drop(self, connection: Connection) -> None:
        """Close `connection`."""
        self.release(connection)
        connection.close()

    def drop_one(self) -> None:
        """Make room for another connection. Do nothing if there is none to drop."""
        for address, _ in self._of_address.most_common(1):
            found = [connection for connection in self._connections if connection.address == address]
            self.drop(next((connection for connection in found if not connection.has_greeted), found[0]))


class PendingConnections(Crowd[PendingConnection]):
    """Connections during the handshake, which a selector watches."""

    def __init__(self, selector: selectors.BaseSelector, limits: PendingLimits) -> None:
        super().__init__(limits.count)
        self._selector, self._limits = selector, limits

    def add(self, connection: PendingConnection) -> None:
        """Add `connection`, which the selector returns as data whenever its socket is ready."""
        super().add(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def wait_for(self, connection: PendingConnection, event: int) -> None:
        """Wait for another event of `connection`."""
        self._selector.modify(connection.socket, event, connection)

    def release(self, connection: PendingConnection) -> None:
        """Remove `connection` from the selector; its socket stays open."""
        self._selector.unregister(connection.socket)
        super().release(connection)

    def drop_late(self, now: float) -> None:
        """Drop all connections whose time to authenticate is over."""
        for connection in [connection for connection in self._connections if connection.deadline <= now]:
            self.drop(connection)

    def drop_all(self) -> None:
        """Drop all connections, at the end of a server."""
        for connection in list(self._connections):
            self.drop(connection)

    def deadline(self) -> float:
        """Return the time by which a connection that arrives now must authenticate."""
        return time.monotonic() + self._limits.patience
