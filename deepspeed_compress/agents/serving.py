"""Server of an endpoint that no client can take from the others.

By itself, uvicorn waits forever for the rest of a request, and for a client that does not read its answer. Here a
connection ends when its client has kept the server waiting for too long, or when a new one needs its place. Clients
share the memory: large bodies count until their answers have been sent. Errors have OpenAI's form,
`{"error": {"message": ...}}`, whose message its clients show.
"""

import asyncio
import resource
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_PATIENCE = 30.0
"""Seconds that a client has to send a request, and to read a piece of an answer."""
_ACCEPTED = 128
"""Largest number of connections that are accepted before the first of them is counted."""
_LARGEST_BODY = 1 << 24
"""Bytes of the largest request."""
_MOST_BODIES = 1 << 26
"""Bytes of all requests that are larger than `_PIECE`, until they are answered."""
_PIECE = 1 << 16
"""Bytes of an answer that are sent before the client has read what precedes them."""
_RETRY_AFTER_S = 1
"""Seconds after which a client whose request was refused for load should try again."""


def error_response(
    status: int, message: str, headers: Mapping[str, str] | None = None, code: str | None = None
) -> JSONResponse:
    """Return an error. Clients tell some errors apart by OpenAI's `code`."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    # JSON may escape half of a surrogate pair, which a message that repeats it cannot be encoded with.
    text = message.encode(errors="backslashreplace").decode()
    return JSONResponse({"error": {"message": text, "type": kind, "param": None, "code": code}}, status, headers)


class Guard:
    """Middleware that checks the bearer token before anything of a body is read, and bounds what clients hold.

    Args:
        app: the application.
        secret: key that requests must bring as a bearer token; None to serve everyone who reaches the port.
    """

    def __init__(self, app: ASGIApp, secret: str | None) -> None:
        self._app, self._secret, self._held = app, secret, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        authorization = Headers(scope=scope).get("authorization", "")
        if self._secret is not None and not secrets.compare_digest(
            authorization.encode(), f"Bearer {self._secret}".encode()
        ):
            # LiteLLM knows a wrong key by the first words only.
            message = "Incorrect API key provided: the bearer token is missing or wrong"
            await error_response(401, message, code="invalid_api_key")(scope, receive, send)
            return
        body = _BoundedBody(scope, receive, self)
        try:
            await self._app(scope, body, partial(_send_in_pieces, send))
        finally:
            self._held -= body.held

    def hold(self, size: int) -> None:
        """Count bytes of a body, until its request is answered.

        Raises:
            HTTPException: with status 429, there are too many.
        """
        if self._held + size > _MOST_BODIES:
            busy = f"requests with {self._held} bytes are being answered (allowed: {_MOST_BODIES})"
            raise HTTPException(429, f"{busy}: try again later", {"Retry-After": str(_RETRY_AFTER_S)})
        self._held += size


class _BoundedBody:
    """Messages of a request, as long as neither its body nor those of all requests are too large.

    Attributes:
        held: bytes of it that the guard counts.
    """

    def __init__(self, scope: Scope, receive: Receive, guard: Guard) -> None:
        self._receive, self._guard = receive, guard
        self._announced = int(Headers(scope=scope).get("content-length", "0"))
        self._read = self.held = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        if max(self._read, self._announced) > _LARGEST_BODY:
            raise HTTPException(413, f"the body has more than {_LARGEST_BODY} bytes")
        while self.held + _PIECE < self._read:
            self._guard.hold(_PIECE)
            self.held += _PIECE
        return message


async def _send_in_pieces(send: Send, message: Message) -> None:
    """Send a body in pieces. A client that does not read keeps one of them in the memory of the connection."""
    body = message.get("body", b"")
    ends = range(_PIECE, len(body), _PIECE)
    for end in ends:
        await send({**message, "body": body[end - _PIECE : end], "more_body": True})
    await send({**message, "body": body[len(ends) * _PIECE :]} if ends else message)


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
        app: the application (see `make_vllm_endpoint`).
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
