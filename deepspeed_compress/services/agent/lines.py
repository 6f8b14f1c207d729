"""Messages over a socket: JSON objects, a line each, as `rendezvous.wire` has them."""

import select
import socket

from deepspeed_compress.services.rendezvous.wire import Message, decode, encode

__all__ = ["Lines", "connect"]

_LONGEST = 1 << 16


class Lines:
    """One end of a connection. Not for several threads."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._rest = b""

    def say(self, message: Message) -> None:
        """OSError where the other end is gone."""
        self.socket.sendall(encode(message))

    def hear(self, wait: float) -> list[Message]:
        """What has come, for which this waits at most `wait` seconds. EOFError where the other end is gone."""
        if not select.select([self.socket], [], [], wait)[0]:
            return []
        try:
            found = self.socket.recv(_LONGEST)
        except OSError as error:
            raise EOFError(str(error)) from error
        if not found:
            raise EOFError("it has closed the connection")
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [decode(line) for line in lines]

    def close(self) -> None:
        self.socket.close()


def connect(host: str, port: int, timeout: float) -> Lines:
    """A connection that answers at once. OSError where nobody listens."""
    connected = socket.create_connection((host, port), timeout)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.settimeout(timeout)
    return Lines(connected)
