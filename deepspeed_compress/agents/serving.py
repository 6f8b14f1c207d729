"""Server of an endpoint that no client can take from the others.

By itself, uvicorn waits forever for the rest of a request, and for a client that does not read its answer. Here a
connection ends when its client has kept the server waiting for too long, or when a new one needs its place.
"""

import asyncio
import resource
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_PATIENCE = 30.0
"""Seconds that a client has to send a request, and to read a piece of an answer."""
_ACCEPTED = 128
"""Largest number of connections that are accepted before the first of them is counted."""


class BoundedConnection(H11Protocol):
    """HTTP connection that ends if its client is late, or if it has waited longest when there are too many.

    Args:
        most: largest number of connections.
        patience: seconds that a client has to send a request, and to read a piece of an answer.
        parts: arguments that uvicorn passes.
    """

    def __init__(self, most: int, patience: float, **parts: Any) -> None:
        super().__init__(**parts)
        self._most, self._patience = most, patience
        self._timer = self.loop.call_later(patience, self._end_if_late)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            connections = cast("set[BoundedConnection]", self.connections)
            waiting = (one for one in connections if one is not self and one.is_waiting)
            min(waiting, key=lambda one: one.deadline, default=self).end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect()

    @property
    def is_waiting(self) -> bool:
        """Return True if the next thing to happen is that the client sends or reads something."""
        is_answering = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        return not is_answering or self.flow.write_paused or self.transport.is_closing()

    @property
    def deadline(self) -> float:
        """Return the time at which the connection ends if the client does nothing."""
        return self._timer.when()

    def end(self) -> None:
        """End the connection at once, and make its place free."""
        self.connections.discard(self)
        self.transport.abort()

    def _expect(self) -> None:
        """Give the client time from now on."""
        self._timer.cancel()
        self._timer = self.loop.call_later(self._patience, self._end_if_late)

    def _end_if_late(self) -> None:
        if self.is_waiting:
            self.end()
        else:
            self._expect()


def make_server(app: ASGIApp, host: str, port: int, most: int = 1024, patience: float = _PATIENCE) -> uvicorn.Server:
    """Return a server of `app`, whose method `run` serves until a signal ends it.

    Args:
        app: the application (see `make_endpoint`).
        host: address to listen at.
        port: port to listen at.
        most: largest number of connections; less if the process may not open 256 more descriptors than that.
        patience: seconds that a client has to send a request, and to read a piece of an answer.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    bounded: Any = partial(BoundedConnection, max(1, min(most, descriptors - 2 * _ACCEPTED)), patience)
    # A malformed request is a warning of uvicorn, with which clients could fill a disk.
    config = uvicorn.Config(app, host, port, http=bounded, backlog=_ACCEPTED, log_level="error")
    return uvicorn.Server(config)
