"""A store that is served over TCP, for ranks and receivers without a shared file system.

It uses the package's transport: both sides prove that they know a shared secret, sizes are checked before memory is
allocated, and TLS is used if it is configured. One request travels at a time on a connection.
"""

import json
import threading
from collections.abc import Sequence
from types import TracebackType

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import AuthenticationError
from deepspeed_compress.transport.fields import Table, a_text, check_message
from deepspeed_compress.transport.frames import Head, Limits
from deepspeed_compress.transport.server import Server

__all__ = ["ServedStore", "StoreServer"]

_SERVICE = "rollout store"
_LIMITS = Limits(body=1 << 28)
"""Largest body: a part with the largest slice, and more than half a million names."""
_NAME = a_text(128, 1)
_REQUESTS: Table = {"put": {"name": _NAME}, "get": {"name": _NAME}, "delete": {"name": _NAME}, "names": {}}
_ANSWERS: Table = {"done": {}, "missing": {}, "failed": {"why": a_text(1000)}}


class StoreServer:
    """Server of a store. It runs in a thread until it is closed, and can be used in a `with` statement.

    Args:
        store: the store.
        host: address to listen at; "" for all.
        port: port to listen at; 0 selects a free one. The attribute `port` has the selected one.
        credentials: credentials of this side; None for those that the environment and the user's files name.
    """

    def __init__(self, store: Store, host: str = "", port: int = 0, credentials: Credentials | None = None) -> None:
        self._store = store
        self._server = Server(_SERVICE, self._serve, host, port, credentials or Credentials.find(), _LIMITS)
        self.port = self._server.port
        threading.Thread(target=self._server.run, daemon=True).start()

    def close(self) -> None:
        """End all connections without waiting."""
        self._server.stop()

    def __enter__(self) -> "StoreServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _serve(self, connection: Connection) -> None:
        while True:
            request = connection.receive()
            if request is None:
                return
            check_message(request, _REQUESTS)
            try:
                head, body = self._answer(request, bytes(connection.read_body()))
            except (OSError, RolloutError) as error:
                head, body = {"kind": "failed", "why": f"{type(error).__name__}: {error}"[:1000]}, b""
            connection.send(head, body)

    def _answer(self, request: Head, body: bytes) -> tuple[Head, bytes]:
        """Carry out a request. Return the head and the body of the answer."""
        match request["kind"]:
            case "put":
                self._store.put(request["name"], body)
            case "delete":
                self._store.delete(request["name"])
            case "names":
                return {"kind": "done"}, json.dumps(list(self._store.names())).encode()
            case "get":
                return self._get(request["name"])
        return {"kind": "done"}, b""

    def _get(self, name: str) -> tuple[Head, bytes]:
        try:
            return {"kind": "done"}, self._store.get(name)
        except KeyError:
            return {"kind": "missing"}, b""


class ServedStore:
    """Store at a `StoreServer`. Threads may share it.

    A request is repeated once on a new connection, which changes nothing if the first one was carried out.

    Args:
        address: "host:port" of the server.
        credentials: credentials of this side; None for those that the environment and the user's files name.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self._address, self._credentials = address, credentials or Credentials.find()
        self._connection: Connection | None = None
        self._lock = threading.Lock()

    def put(self, name: str, data: bytes) -> None:
        self._request({"kind": "put", "name": name}, data)

    def get(self, name: str) -> bytes:
        return self._request({"kind": "get", "name": name})

    def names(self) -> Sequence[str]:
        return [str(name) for name in json.loads(self._request({"kind": "names"}))]

    def delete(self, name: str) -> None:
        self._request({"kind": "delete", "name": name})

    def close(self) -> None:
        """Close the connection. A later request opens another one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, head: Head, body: bytes = b"") -> bytes:
        with self._lock:
            try:
                answer, found = self._exchange(head, body)
            except AuthenticationError:
                raise
            except ConnectionError:
                self.close()
                answer, found = self._exchange(head, body)
        if answer["kind"] == "missing":
            raise KeyError(head["name"])
        if answer["kind"] == "failed":
            raise OSError(f"the store at {self._address} has failed: {answer['why']}")
        return found

    def _exchange(self, head: Head, body: bytes) -> tuple[Head, bytes]:
        if self._connection is None:
            self._connection = connect(self._address, _SERVICE, self._credentials, limits=_LIMITS)
        self._connection.send(head, body)
        answer = self._connection.receive(_LIMITS.patience)
        if answer is None:
            self.close()
            raise TimeoutError(f"the store at {self._address} has not answered for {_LIMITS.patience:g} s")
        check_message(answer, _ANSWERS)
        return answer, bytes(self._connection.read_body())
