"""HTTP server of a store, with FastAPI and uvicorn.

    GET /blobs/            names, as a list in JSON
    GET /blobs/{name}      content of a blob; 404 if there is none
    PUT /blobs/{name}      stores the body
    DELETE /blobs/{name}   deletes a blob if it exists

A request must be signed with the shared secret (see `signatures`). This is checked before anything of its body is read.
"""

import asyncio
import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable
from types import TracebackType

from deepspeed_compress.errors import RolloutError, install_command
from deepspeed_compress.rollout.signatures import SIGNATURE, WINDOW, SeenNonces, Stamp
from deepspeed_compress.rollout.store import LARGEST, Store, check_name
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.server import listen

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.concurrency import run_in_threadpool
    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    raise ImportError(
        f"a server of a store needs {error.name}, which this environment does not have; write: "
        f"{install_command('http')}"
    ) from error

_AT_ONCE = 16
"""Number of requests that are served at a time, each with at most one blob in memory. Others wait."""
_PATIENCE = 600.0
"""Seconds after which a request is given up, such as that of a client that does not read its answer."""
_IDLE = 30
"""Seconds for which an idle connection stays open: longer than at the client, which closes it first."""


class StoreServer:
    """HTTP server of a store. It runs in a thread until it is closed, and can be used in a `with` statement.

    If TLS is configured, both sides show certificates, and clients write "https" (see docs/security.md).

    Args:
        store: the store.
        host: address to listen at; "" for all.
        port: port to listen at; 0 selects a free one. The attribute `port` has the selected one.
        credentials: credentials of this side; None for those that the environment and the user's files name.
        largest: bytes of the largest blob that clients may store.

    Raises:
        OSError: the address is not available.
    """

    def __init__(
        self,
        store: Store,
        host: str = "",
        port: int = 0,
        credentials: Credentials | None = None,
        largest: int = LARGEST,
    ) -> None:
        credentials = credentials or Credentials.find()
        socket = listen(host, port)
        self.port = int(socket.getsockname()[1])
        self._server = uvicorn.Server(_config(_make_app(_Service(store, credentials.secret.key, largest)), credentials))
        self._thread = threading.Thread(target=self._server.run, args=([socket],), daemon=True)
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


class _Connection(H11Protocol):  # type: ignore[misc]  # uvicorn is not typed here
    """Connection that is closed if the server waits for its client, and nothing happens for `_IDLE` seconds.

    uvicorn waits forever for the end of a request's headers, and for a client that does not read its answer.
    """

    _timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self, before: tuple[object, int] | None) -> None:
        """Close the connection if its request and the bytes that it must send are those of the call `before`."""
        now = (self.cycle, self.transport.get_write_buffer_size())
        if now == before and (self.cycle is None or self.cycle.response_complete or self.flow.write_paused):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(_IDLE, self._watch, now)


class _Bounded:
    """Middleware that bounds how many requests are served at a time, and how long each of them takes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._slots = app, asyncio.Semaphore(_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._slots, asyncio.timeout(_PATIENCE):
            await self._app(scope, receive, send)


class _Service:
    """Handlers of requests. Answers are signed, except for the refusal of a request that is not."""

    def __init__(self, store: Store, key: bytes, largest: int) -> None:
        self._store, self._key, self._largest = store, key, largest
        self._seen = SeenNonces()

    async def get(self, request: Request, name: str) -> Response:
        stamp = self._check(request, name)
        return await run_in_threadpool(self._answer, stamp, lambda: self._content(name))

    async def put(self, request: Request, name: str) -> Response:
        stamp = self._check(request, name)
        body = await self._read(request)
        if body is None:
            return self._sign(stamp, 413, f"the body has more than {self._largest} bytes".encode())
        return await run_in_threadpool(self._put, stamp, bytes(body))

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
        if request.method != "GET" and not self._seen.add(stamp):
            raise HTTPException(401, "the request was carried out before")
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

    def _put(self, stamp: Stamp, body: bytes) -> Response:
        if hashlib.sha256(body).hexdigest() != stamp.digest:
            return self._sign(stamp, 422, b"the body has arrived damaged: its SHA-256 is another one")
        return self._answer(stamp, lambda: self._store_body(stamp.name, body))

    def _answer(self, stamp: Stamp, work: Callable[[], bytes]) -> Response:
        """Return the answer to a request that `work` carries out."""
        try:
            if stamp.name:
                check_name(stamp.name)
            return self._sign(stamp, 200, work())
        except KeyError:
            return self._sign(stamp, 404, b"")
        except RolloutError as error:
            return self._sign(stamp, 400, str(error).encode())
        except OSError as error:
            return self._sign(stamp, 500, f"{type(error).__name__}: {error}".encode())

    def _sign(self, stamp: Stamp, status: int, body: bytes) -> Response:
        headers = {SIGNATURE: stamp.sign_answer(self._key, status, body)}
        return Response(body, status, headers, "application/octet-stream")

    def _content(self, name: str) -> bytes:
        return self._store.get(name) if name else json.dumps(list(self._store.names())).encode()

    def _store_body(self, name: str, body: bytes) -> bytes:
        check_name(name)
        self._store.put(name, body)
        return b""

    def _delete(self, name: str) -> bytes:
        check_name(name)
        self._store.delete(name)
        return b""
