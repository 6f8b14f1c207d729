"""A store that a server shares with ranks and receivers that have no shared file system: both sides.

A client sends `put` (with the content as the body), `get`, `names` and `delete`. The server answers `done`, `missing`
(there is no such blob) or `failed`. Bodies are read from and written to the disk piece by piece, so clients cost no
memory, however slow they are.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from deepspeed_compress.errors import ConfigError, RolloutError
from deepspeed_compress.rollout.store import LARGEST, DirectoryStore
from deepspeed_compress.transport.client import RequestClient, connect, parse_address
from deepspeed_compress.transport.connection import CHUNK, LARGE_HEAD, Connection, Limits
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import AuthenticationError, OtherServiceError
from deepspeed_compress.transport.messages import Address, Fields, Messages, Text
from deepspeed_compress.transport.server import Server

STORE = "store"
"""Name of the service."""
LIMITS = Limits(body=LARGEST, patience=30.0)
_IDLE = 30.0
"""Seconds after which a connection without requests is closed. Clients connect again."""


class _Blob(Fields):
    name: Address


_REQUESTS = Messages({"put": _Blob, "get": _Blob, "names": Fields, "delete": _Blob})


class StoreServer(AbstractContextManager["StoreServer"]):
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

    def __exit__(self, *_: object) -> None:
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


SCHEME = "tcp://"
"""Beginning of an address of a store."""
_CONNECT = 10.0
"""Most seconds to wait for a connection: a host that is gone does not refuse any."""
_FIRST_PAUSE = 0.25
"""Seconds before the second attempt. Each later pause is twice as long."""


class _Done(Fields):
    names: list[Address] | None = None


class _Failed(Fields):
    why: Text


_ANSWERS = Messages({"done": _Done, "missing": Fields, "failed": _Failed})


class ServedStore:
    """Store at a `StoreServer`. Threads may share it; their requests wait for each other.

    A request that fails on the way is repeated, with growing pauses. This changes nothing if an earlier attempt was
    carried out.

    Args:
        address: "tcp://host:port" of the server.
        credentials: credentials of this side; None for those that the environment and the user's files name.
        timeout: seconds to wait for any progress of a request, and for a connection if that is less than 10.
        attempts: number of times that a request is sent. Six attempts take 8 seconds if the server refuses connections.

    Raises:
        ConfigError: the address is malformed.
    """

    def __init__(
        self, address: str, credentials: Credentials | None = None, timeout: float = 60.0, attempts: int = 6
    ) -> None:
        self._place = address.removeprefix(SCHEME)
        try:
            parse_address(self._place if address.startswith(SCHEME) else "")
        except ValueError:
            allowed = f'allowed: "{SCHEME}host:port", such as "{SCHEME}10.0.0.7:29500"'
            raise ConfigError(f"{address!r} is not the address of a store ({allowed})") from None
        self._credentials, self._timeout, self._attempts = credentials or Credentials.find(), timeout, attempts
        self._requests = RequestClient(self._connect, timeout)

    def put(self, name: str, data: bytes) -> None:
        if len(data) > LARGEST:
            raise OSError(f"{name} has {len(data)} bytes (allowed: {LARGEST})")
        self._request("put", name, data)

    def get(self, name: str) -> bytes:
        return bytes(self._request("get", name)[1])

    def names(self) -> Sequence[str]:
        return list(self._request("names")[0].get("names") or ())

    def delete(self, name: str) -> None:
        self._request("delete", name)

    def close(self) -> None:
        """Close the connection."""
        self._requests.end()

    def _request(self, kind: str, name: str = "", data: bytes = b"") -> tuple[Mapping[str, Any], bytearray]:
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(_FIRST_PAUSE * 2 ** (attempt - 1))
            try:
                answer, body = self._requests.request({"kind": kind, "name": name}, data)
                _ANSWERS.read(answer)
                break
            except (AuthenticationError, OtherServiceError):
                raise
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
        else:
            raise ConnectionError(f"the store at {self._place} has failed {self._attempts} times; last: {problem}")
        if answer["kind"] == "missing":
            raise KeyError(name)
        if answer["kind"] == "failed":
            raise OSError(f"the store at {self._place} has failed: {answer['why']}")
        return answer, body

    def _connect(self) -> Connection:
        limits = Limits(head=LARGE_HEAD, body=LARGEST, patience=self._timeout)
        return connect(self._place, STORE, self._credentials, min(self._timeout, _CONNECT), limits, self._timeout)
