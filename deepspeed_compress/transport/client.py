"""Client side: connections, which are authenticated, and requests over one that is made again if it is lost."""

import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from deepspeed_compress.transport.channel import Channel, keep_alive
from deepspeed_compress.transport.connection import DEFAULT_LIMITS, Buffer, Connection, Head, Limits
from deepspeed_compress.transport.credentials import SECRET, SECRET_FILE, Credentials
from deepspeed_compress.transport.errors import AuthenticationError, ProtocolError
from deepspeed_compress.transport.handshake import client_steps, follow


def connect(
    address: str,
    service: str,
    credentials: Credentials,
    timeout: float = 5.0,
    limits: Limits = DEFAULT_LIMITS,
    silence: float = 10.0,
) -> Connection:
    """Return an authenticated connection to `service` at `address` ("host:port").

    Args:
        address: "host:port" of the server.
        service: name of the service.
        credentials: credentials of this side.
        timeout: seconds to connect, and again for TLS and the handshake.
        limits: limits of what the server may send.
        silence: seconds without a sign of the other host; the kernel ends the connection after three times as many.

    Raises:
        AuthenticationError: if the secrets or certificates differ. Trying again does not help.
        OSError: if no server, or a different kind of server, answers in time.
        ValueError: if `address` is not "host:port".
    """
    connected = socket.create_connection(parse_address(address), timeout=timeout)
    try:
        keep_alive(connected, silence)
        connected.settimeout(timeout)
        if credentials.tls is not None:
            connected = credentials.tls.client.wrap_socket(connected)
        channel = Channel(connected)
        follow(client_steps(credentials.secret.key, service), channel, time.monotonic() + timeout)
        return Connection(channel, limits, address)
    except (AuthenticationError, ConnectionError, ssl.SSLError) as error:
        connected.close()
        raise _explained(error, address, credentials) from None
    except BaseException:
        connected.close()
        raise


def parse_address(address: str) -> tuple[str, int]:
    """Return the host and the port of "host:port". Raises ValueError for anything else.

    An IPv6 address is written in brackets.
    """
    found = re.fullmatch(r"(?:\[([^\]\s]+)\]|([^:\s\[\]]+)):([0-9]{1,5})", address)
    if found is None or int(found[3]) > 65535:
        raise ValueError(f"{address!r} is not an address (allowed: host:port); write 10.0.0.1:29400")
    return found[1] or found[2], int(found[3])


def own_address(towards: str) -> str:
    """Return the address of this host on its route to the host `towards`, at which other hosts reach it."""
    family = socket.getaddrinfo(towards, None, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing. Its port is that of the discard service, but any other would do.
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def _explained(error: OSError, address: str, credentials: Credentials) -> OSError:
    if isinstance(error, AuthenticationError):
        return AuthenticationError(
            f"{address}: {error}. The secret here is from {credentials.secret.source}: give both hosts the same one, "
            f"by copies of that file (mode 0600), {SECRET} or {SECRET_FILE}"
        )
    if isinstance(error, ssl.SSLEOFError | BrokenPipeError | ConnectionResetError):
        return ProtocolError(
            f"{address}: the server closed the connection during the handshake; perhaps only one side uses TLS, or the "
            "server does not accept the certificate of this side"
        )
    if not isinstance(error, ssl.SSLError):
        return error
    return AuthenticationError(
        f"{address}: TLS failed ({error}); use certificates of one authority on both sides, or TLS on neither"
    )


class RequestClient:
    """Client that sends one request at a time over a connection, which it opens when it needs one.

    An error ends the connection, because the answer could arrive in place of that of the next request.

    Args:
        open_connection: returns a new connection.
        timeout: seconds to wait for an answer.
    """

    def __init__(self, open_connection: Callable[[], Connection], timeout: float) -> None:
        self._open_connection, self._timeout = open_connection, timeout
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def request(self, head: Head, body: Buffer = b"") -> tuple[dict[str, Any], bytearray]:
        """Send a request, and return the head and the body of its answer."""
        with self._lock:
            try:
                if self._connection is not None and self._connection.has_hung_up():
                    # The server closes connections that are idle.
                    self.hang_up()
                connection = self._connection = self._connection or self._open_connection()
                connection.send(head, body)
                answer = connection.receive(self._timeout)
                if answer is None:
                    raise TimeoutError(f"no answer for {self._timeout:g} s")
                return answer, connection.read_body()
            except BaseException:
                self.hang_up()
                raise

    def end(self, patience: float = -1) -> None:
        """Close the connection. A request that waits for its answer gets an error at once.

        Args:
            patience: seconds to wait for the thread of that request; no limit if it is negative.
        """
        connection = self._connection
        if connection is not None:
            connection.end()
        if self._lock.acquire(timeout=patience):
            self.hang_up()
            self._lock.release()

    def hang_up(self) -> None:
        """Close the connection, in the thread that uses it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
