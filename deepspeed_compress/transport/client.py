"""Client side: connect, authenticate, and return a connection."""

import re
import socket
import ssl
import time

from deepspeed_compress.transport.channel import Channel, keep_alive
from deepspeed_compress.transport.connection import DEFAULT_LIMITS, Connection, Limits
from deepspeed_compress.transport.credentials import Credentials
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
            f"{address}: {error}. The secret here is from {credentials.secret.source}: {credentials.secret.advice}"
        )
    if isinstance(error, ssl.SSLEOFError | BrokenPipeError | ConnectionResetError):
        return ProtocolError(f"{address}: {_ENDED}")
    if not isinstance(error, ssl.SSLError):
        return error
    return AuthenticationError(
        f"{address}: TLS failed ({error}); use certificates of one authority on both sides, or TLS on neither"
    )


_ENDED = (
    "the server closed the connection during the handshake; perhaps only one side uses TLS, or the server does not "
    "accept the certificate of this side"
)
