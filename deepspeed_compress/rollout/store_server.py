"""Server of a store, for ranks and receivers without a shared file system.

A client sends `put` (with the content as the body), `get`, `names` and `delete`. The server answers `done`, `missing`
(there is no such blob) or `failed`. Bodies are read from and written to the disk piece by piece, so clients cost no
memory, however slow they are.
"""

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout.store import LARGEST, DirectoryStore
from deepspeed_compress.transport.connection import CHUNK, Connection, Limits
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.messages import Address, Fields, Messages
from deepspeed_compress.transport.server import Server

STORE = "store"
"""Name of the service."""
LIMITS = Limits(body=LARGEST, patience=30.0)
_IDLE = 30.0
"""Seconds after which a connection without requests is closed. Clients connect again."""


class _Blob(Fields):
    name: Address


_REQUESTS = Messages({"put": _Blob, "get": _Blob, "names": Fields, "delete": _Blob})


class StoreServer:
    """Server of a store. It runs in a thread until it is closed, and can be used in a `with` statement.

    Args:
        store: the store.
        host: address to listen at; "" for all.
        port: port to listen at; 0 selects a free one. The attribute `port` has the selected one.
        credentials: credentials of this side; None for those that the environment and the user's files name.
        limits: limits of what clients may send.
        log: receives log lines about failed connections, at a limited rate.

    Raises:
        OSError: the address is not available.
    """

    def __init__(
        self,
        store: DirectoryStore,
        host: str = "127.0.0.1",
        port: int = 0,
        credentials: Credentials | None = None,
        limits: Limits = LIMITS,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._store = store
        credentials = credentials or Credentials.find()
        self._server = Server(STORE, self._serve, host, port, credentials, limits, log=log)
        self.port = self._server.port
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server. Requests that run have a second to end."""
        self._server.stop(drain=1.0)
        self._thread.join()

    def __enter__(self) -> "StoreServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _serve(self, connection: Connection) -> None:
        """Answer the requests of one connection. Errors of the store are answers, and end nothing."""
        while (request := connection.receive(_IDLE)) is not None:
            _REQUESTS.read(request)
            try:
                self._answer(connection, request)
            except KeyError:
                connection.send({"kind": "missing"})
            except (RolloutError, OSError) as error:
                # If the connection itself has failed, this raises its error.
                connection.send({"kind": "failed", "why": f"{type(error).__name__}: {error}"[:1000]})

    def _answer(self, connection: Connection, request: Mapping[str, Any]) -> None:
        kind = request["kind"]
        if kind == "get":
            # The file stays as it is if the blob is replaced or deleted.
            with self._store.open(request["name"]) as file:
                size = os.fstat(file.fileno()).st_size
                connection.send_pieces({"kind": "done"}, size, iter(partial(file.read, CHUNK), b""))
        elif kind == "names":
            connection.send({"kind": "done", "names": list(self._store.names())})
        else:
            if kind == "put":
                self._store.put_pieces(request["name"], connection.pieces())
            else:
                self._store.delete(request["name"])
            connection.send({"kind": "done"})
