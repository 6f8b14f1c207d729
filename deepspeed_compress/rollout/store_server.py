"""HTTP server of a store, with FastAPI and uvicorn.

    GET /blobs/            names, as a list in JSON
    GET /blobs/{name}      content of a blob; 404 if there is none
    PUT /blobs/{name}      stores the body
    DELETE /blobs/{name}   deletes a blob if it exists

A request must be signed with the shared secret (see `signatures`). This is checked before anything of its body is read.
"""

import asyncio
import hashlib
import io
import json
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

from deepspeed_compress.errors import RolloutError, install_command
from deepspeed_compress.rollout.signatures import SIGNATURE, WINDOW, SeenNonces, Stamp
from deepspeed_compress.rollout.store import LARGEST, DirectoryStore, check_name
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.pending import Crowd, PendingLimits
from deepspeed_compress.transport.rate_limited_log import RateLimitedLog
from deepspeed_compress.transport.server import ACCEPT_PAUSE, EXHAUSTED, listen

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from fastapi.responses import StreamingResponse
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    raise ImportError(
        f"a server of a store needs {error.name}, which this environment does not have; write: "
        f"{install_command('http')}"
    ) from error

_File = io.BufferedReader | io.BytesIO
_AT_ONCE = 16
"""Number of bodies that are received at a time, each in memory. Others wait."""
_PIECE = 1 << 17
"""Bytes of an answer that are read from the store at a time. About three such pieces are in memory."""
_PATIENCE = 600.0
"""Seconds after which a request is given up, such as that of a client that does not read its answer."""
_IDLE = 30
"""Seconds for which an idle connection stays open: longer than at the client, which closes it first."""
_UNSIGNED = PendingLimits()
"""Limits of connections that have not sent a signed request."""


class StoreServer:
    """HTTP server of a store. It runs in a thread until it is closed, and can be used in a `with` statement.

    If TLS is configured, both sides show certificates, and clients write "https" (see docs/security.md).

    Args:
        store: the store, whose files are sent piece by piece.
        host: address to listen at; "" for all.
        port: port to listen at; 0 selects a free one. The attribute `port` has the selected one.
        credentials: credentials of this side; None for those that the environment and the user's files name.
        largest: bytes of the largest blob that clients may store.

    Raises:
        OSError: the address is not available.
    """

    def __init__(
        self,
        store: DirectoryStore,
        host: str = "",
        port: int = 0,
        credentials: Credentials | None = None,
        largest: int = LARGEST,
    ) -> None:
        credentials = credentials or Credentials.find()
        listener = listen(host, port)
        self.port = int(listener.getsockname()[1])
        app = _make_app(_Service(store, credentials.secret.key, largest))
        self._server = _Server(_config(app, credentials), listener)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server. Requests that run have a second to end."""
        self._server.handle_exit(signal.SIGTERM, None)
        self._thread.join()

    def __enter__(self) -> "StoreServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _config(app: ASGIApp, credentials: Credentials) -> uvicorn.Config:
    tls = credentials.tls
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_IDLE,
        timeout_graceful_shutdown=1,
        ssl_context_factory=None if tls is None else lambda config, default: tls.server,
    )


def _make_app(service: "_Service") -> ASGIApp:
    app = FastAPI(openapi_url=None)
    app.add_api_route("/blobs/{name:path}", service.get, methods=["GET"])
    app.add_api_route("/blobs/{name:path}", service.put, methods=["PUT"])
    app.add_api_route("/blobs/{name:path}", service.delete, methods=["DELETE"])
    return _Bounded(app)


class _Unsigned:
    """Connection that has not sent a signed request, in the TLS handshake or after it."""

    has_greeted = False

    def __init__(self, connected: socket.socket, address: str) -> None:
        self.socket, self.address = connected, address

    def close(self) -> None:
        """Let the event loop, which owns the socket, see that the connection has ended."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


class _Server(uvicorn.Server):  # type: ignore[misc]  # uvicorn is not typed here
    """Server that bounds connections without a signed request, and lines of its log.

    uvicorn accepts connections until no descriptor is left, and then logs thousands of lines per second.
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener, self._unsigned = listener, Crowd[_Unsigned](_UNSIGNED.count)
        self._log = RateLimitedLog(partial(print, "store server:", file=sys.stderr, flush=True))
        self._logger = logging.Logger(__name__, logging.WARNING)
        self._logger.addHandler(_LimitedHandler(self._log))
        self._connecting: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=[])
        self._accepting = asyncio.create_task(self._accept())

    async def shutdown(self, sockets: Any = None) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        await super().shutdown()

    async def _accept(self) -> None:
        """Accept connections until this is canceled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connected, address = await loop.sock_accept(self._listener)
            except OSError as error:
                self._log(f"a connection could not be accepted ({error})")
                if error.errno in EXHAUSTED:
                    self._unsigned.drop_one()
                    await asyncio.sleep(ACCEPT_PAUSE)
                continue
            one = _Unsigned(connected, str(address[0]))
            self._unsigned.add(one)
            loop.call_later(_UNSIGNED.patience, self._drop, one)
            task = loop.create_task(self._connect(one))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            # While connections wait, sock_accept returns without letting anything else run.
            await asyncio.sleep(0)

    async def _connect(self, one: _Unsigned) -> None:
        """Make the protocol of a connection, after the TLS handshake if there is one."""
        protocol = partial(
            _Connection,
            self.config,
            self.server_state,
            {"trust": partial(self._trust, one)},
            logger=self._logger,
            ended=partial(self._trust, one),
        )
        try:
            await asyncio.get_running_loop().connect_accepted_socket(protocol, one.socket, ssl=self.config.ssl)
        except OSError:
            self._trust(one)

    def _trust(self, one: _Unsigned) -> None:
        """Count a connection no more: it has sent a signed request, or has ended."""
        if one in self._unsigned:
            self._unsigned.release(one)

    def _drop(self, one: _Unsigned) -> None:
        if one in self._unsigned:
            self._unsigned.drop(one)


class _LimitedHandler(logging.Handler):
    """Handler that passes records of uvicorn to a log with a limited rate."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log(self.format(record))


class _Connection(H11Protocol):  # type: ignore[misc]  # uvicorn is not typed here
    """Connection that is closed if the server waits for its client, and nothing happens for `_IDLE` seconds.

    uvicorn waits forever for the end of a request's headers, and for a client that does not read its answer.
    """

    _timer: asyncio.TimerHandle

    def __init__(self, *args: Any, logger: logging.Logger, ended: Callable[[], None]) -> None:
        super().__init__(*args)
        self.logger, self._ended = logger, ended

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._ended()
        super().connection_lost(exc)

    def _watch(self, before: tuple[object, int] | None) -> None:
        """Close the connection if its request and the bytes that it must send are those of the call `before`."""
        now = (self.cycle, self.transport.get_write_buffer_size())
        if now == before and (self.cycle is None or self.cycle.response_complete or self.flow.write_paused):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_IDLE, self._watch, now)


class _Bounded:
    """Middleware that bounds how long a request takes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(_PATIENCE):
            await self._app(scope, receive, send)


class _Service:
    """Handlers of requests. Answers are signed, except for the refusal of a request that is not."""

    def __init__(self, store: DirectoryStore, key: bytes, largest: int) -> None:
        self._store, self._key, self._largest = store, key, largest
        self._seen, self._slots = SeenNonces(), asyncio.Semaphore(_AT_ONCE)

    async def get(self, request: Request, name: str) -> Response:
        stamp = self._check(request, name)
        return await run_in_threadpool(self._answer, stamp, lambda: self._open(name))

    async def put(self, request: Request, name: str) -> Response:
        stamp = self._check(request, name)
        async with self._slots:
            body = await self._read(request)
            if body is None:
                return self._sign(stamp, 413, f"the body has more than {self._largest} bytes".encode())
            return await run_in_threadpool(self._put, stamp, body)

    async def delete(self, request: Request, name: str) -> Response:
        stamp = self._check(request, name)
        return await run_in_threadpool(self._answer, stamp, lambda: self._delete(name))

    def _check(self, request: Request, name: str) -> Stamp:
        """Return the stamp of a request whose signature is right.

        Raises:
            HTTPException: it is not, or the request is old or was carried out before.
        """
        stamp = Stamp.read(request.method, name, request.headers)
        if stamp is None or not stamp.has_signature(self._key, request.headers.get(SIGNATURE, "")):
            raise HTTPException(401, "the request is not signed with the secret of this server")
        late = time.time() - stamp.time
        if abs(late) > WINDOW:
            raise HTTPException(401, f"the clocks of client and server differ by {late:.0f} s (allowed: {WINDOW})")
        if not self._seen.add(stamp):
            raise HTTPException(401, "the request was carried out before")
        request.state.trust()
        return stamp

    async def _read(self, request: Request) -> bytearray | None:
        """Return the body; None, without reading further, if it is too large."""
        body = bytearray()
        if int(request.headers.get("content-length", 0)) > self._largest:
            return None
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._largest:
                return None
        return body

    def _put(self, stamp: Stamp, body: bytearray) -> Response:
        if hashlib.sha256(body).hexdigest() != stamp.digest:
            return self._sign(stamp, 422, b"the body has arrived damaged: its SHA-256 is another one")
        return self._answer(stamp, lambda: self._store_body(stamp.name, body))

    def _answer(self, stamp: Stamp, work: Callable[[], _File | None]) -> Response:
        """Return the answer to a request that `work` carries out."""
        try:
            if stamp.name:
                check_name(stamp.name)
            file = work()
            return self._sign(stamp, 200, b"") if file is None else self._stream(stamp, file)
        except KeyError:
            return self._sign(stamp, 404, b"")
        except RolloutError as error:
            return self._sign(stamp, 400, str(error).encode())
        except OSError as error:
            return self._sign(stamp, 500, f"{type(error).__name__}: {error}".encode())

    def _sign(self, stamp: Stamp, status: int, body: bytes) -> Response:
        headers = {SIGNATURE: stamp.sign_answer(self._key, status, hashlib.sha256(body).hexdigest())}
        return Response(body, status, headers, _BYTES)

    def _stream(self, stamp: Stamp, file: _File) -> Response:
        """Return an answer whose body is read while it is sent, so that slow clients cost no memory."""
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        headers = {
            SIGNATURE: stamp.sign_answer(self._key, 200, digest),
            "content-length": str(file.seek(0, io.SEEK_END)),
        }
        return _FileResponse(file, headers)

    def _open(self, name: str) -> _File:
        return self._store.open(name) if name else io.BytesIO(json.dumps(list(self._store.names())).encode())

    def _store_body(self, name: str, body: bytearray) -> None:
        check_name(name)
        self._store.put(name, body)

    def _delete(self, name: str) -> None:
        check_name(name)
        self._store.delete(name)


_BYTES = "application/octet-stream"
"""Content type of answers."""


class _FileResponse(StreamingResponse):
    """Answer with the whole content of a file, which is closed at the end, also if the client leaves."""

    def __init__(self, file: _File, headers: Mapping[str, str]) -> None:
        file.seek(0)
        super().__init__(iter(partial(file.read, _PIECE), b""), 200, headers, _BYTES)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)
