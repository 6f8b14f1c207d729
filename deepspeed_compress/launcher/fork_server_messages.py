"""Messages between an agent and its fork server over a private socket pair: one JSON object per line."""

import json
import select
import socket
from collections.abc import Mapping
from typing import Any

_CHUNK = 1 << 16


class LineConnection:
    """One end of the socket pair. Not thread-safe."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._rest = b""
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send `message`. Raises OSError if the other end is gone."""
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, wait: float) -> list[dict[str, Any]]:
        """Return the messages that have arrived, waiting at most `wait` seconds.

        Raises:
            EOFError: if the other end is gone.
        """
        if not self._poll.poll(wait * 1000):
            return []
        try:
            found = self.socket.recv(_CHUNK)
        except OSError as error:
            raise EOFError(str(error)) from error
        if not found:
            raise EOFError("the other end has closed the connection")
        *lines, self._rest = (self._rest + found).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close this end."""
        self.socket.close()
