"""Transfer of anchors from a running island to one that joins: fp32 tensors over an authenticated connection.

Each rank of the joining island receives the tensors from a rank of equal place. Only the joining island waits: the
sending rank serves a copy in a thread while it trains on. Requests for the same version share one copy. A few copies
are sent at once. Other requests wait for their turn, and are told to retry if that takes too long.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.limits import Bounds, Limits
from deepspeed_compress.transport.messages import Count, Fields, Messages
from deepspeed_compress.transport.server import Server

VersionedAnchor = tuple[int, Mapping[str, Any], Mapping[str, Tensor]]
"""Version, metadata, and flat fp32 tensors on the host by name."""
ANCHOR = "anchor"
"""Name of the service."""
TRANSFERS = 4
"""Maximum number of copies that are sent at once."""
CONNECTIONS = 64
"""Maximum number of open connections, including those that wait for their turn."""
SLOWEST = 10.0
"""Minimum time limit, in seconds, for a part of an anchor (256 KiB) to be received."""
_LONGEST_WAIT = 3600.0


class _Request(Fields):
    version: Count
    timeout: Annotated[float, Field(ge=0, le=_LONGEST_WAIT)] | None = None


class _Anchor(Fields):
    version: Count
    about: dict[str, Any]
    sizes: dict[str, int]


_REQUESTS = Messages({ANCHOR: _Request})
_ANSWERS = Messages({ANCHOR: _Anchor, "busy": Fields, "none": Fields})


class AnchorCopy(dict[str, Tensor]):
    """Tensors of one version, shared by all requests. Unlike a dict, it supports weak references."""


class AnchorServer:
    """Server of the anchor of this rank.

    Args:
        host: address of this machine at which others reach it. The server listens on no other address.
        copy: function from a minimum version to the anchor, once that version is reached; None if there is nothing to
            send. Called by threads of this server.
        timeout: seconds for which a joining island waits, and within which it must receive each part.
        credentials: credentials of this side; None for those that the environment and the user's files name.
        transfers: maximum number of copies that are sent at once.
    """

    def __init__(
        self,
        host: str,
        copy: Callable[[int], VersionedAnchor | None],
        timeout: float = SLOWEST,
        credentials: Credentials | None = None,
        transfers: int = TRANSFERS,
    ) -> None:
        self._copy, self._timeout = copy, timeout
        self._turns = threading.BoundedSemaphore(transfers)
        limits, bounds = Limits(head=1 << 12, patience=max(timeout, SLOWEST)), Bounds(CONNECTIONS)
        self._server = Server(ANCHOR, self._serve, host, 0, credentials or Credentials.find(), limits, bounds)
        self.address = f"[{host}]:{self._server.port}" if ":" in host else f"{host}:{self._server.port}"
        threading.Thread(target=self._server.run, daemon=True).start()

    def close(self) -> None:
        """End all connections without waiting."""
        self._server.stop()

    def _serve(self, connection: Connection) -> None:
        """Answer the one request of a connection."""
        request = connection.receive(connection.limits.patience)
        if request is None:
            return
        _REQUESTS.read(request)
        # The client must receive "busy" before it gives up.
        if not self._turns.acquire(timeout=min(self._timeout, request.get("timeout") or SLOWEST) / 2):
            connection.send({"kind": "busy"})
            return
        try:
            self._hand_out(connection, self._copy(request["version"]))
        finally:
            self._turns.release()

    def _hand_out(self, connection: Connection, found: VersionedAnchor | None) -> None:
        if found is None:
            connection.send({"kind": "none"})
            return
        version, about, tensors = found
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        head = {"kind": ANCHOR, "version": version, "about": dict(about), "sizes": sizes}
        connection.send_pieces(head, 4 * sum(sizes.values()), map(_bytes, tensors.values()))


def fetch_anchor(
    address: str,
    version: int,
    timeout: float,
    sizes: Mapping[str, int],
    run: str,
    credentials: Credentials | None = None,
) -> VersionedAnchor:
    """Return the anchor of the rank at `address`, once its version is at least `version`.

    Args:
        address: host and port.
        version: minimum version.
        timeout: seconds to wait for the connection and for each part.
        sizes: expected number of elements of each tensor, by name.
        run: expected run.
        credentials: credentials of this side; None for those that the environment and the user's files name.

    Raises:
        OSError: nothing arrives for `timeout` seconds, the rank does not have that version of the run, something else
            listens there, or too many islands ask.
    """
    size = 4 * sum(sizes.values())
    limits = Limits(body=size, patience=timeout)
    with connect(address, ANCHOR, credentials or Credentials.find(), timeout, limits, timeout) as connection:
        connection.send({"kind": ANCHOR, "version": version, "timeout": min(timeout, _LONGEST_WAIT)})
        head = connection.receive(2 * timeout)
        if head is None:
            raise TimeoutError(f"{address} is silent")
        _ANSWERS.read(head)
        if head["kind"] == "busy":
            raise ConnectionError(f"{address} is busy: too many islands take its anchor")
        _check_answer(head, address, version, sizes, run)
        tensors = {name: _receive(connection, numel) for name, numel in sizes.items()}
    return int(head["version"]), head["about"], tensors


def _check_answer(head: Mapping[str, Any], address: str, version: int, sizes: Mapping[str, int], run: str) -> None:
    known = head["kind"] == ANCHOR and head["about"].get("run") == run and head["sizes"] == sizes
    if not known or head["version"] < version:
        raise ConnectionError(f"{address} does not have version {version} of {run}")


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of `tensor`, contiguous and on the host."""
    return memoryview(tensor.view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


def _receive(connection: Connection, numel: int) -> Tensor:
    tensor = torch.empty(numel)
    if numel:
        connection.read_into(_bytes(tensor))
    return tensor
