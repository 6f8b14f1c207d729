"""A store at a `StoreServer`, for ranks and receivers without a shared file system."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.rollout.store import LARGEST, check_name
from deepspeed_compress.rollout.store_server import STORE
from deepspeed_compress.transport.client import RequestClient, connect, parse_address
from deepspeed_compress.transport.connection import LARGE_HEAD, Connection, Limits
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import AuthenticationError, OtherServiceError
from deepspeed_compress.transport.messages import Address, Fields, Messages, Text

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
            raise ConfigError(
                f'{address!r} is not the address of a store (allowed: "{SCHEME}host:port"); write '
                f'"{SCHEME}10.0.0.7:29500"'
            ) from None
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
        if name:
            check_name(name)
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
