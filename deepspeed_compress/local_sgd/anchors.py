"""The anchor of an island that exchanges in rounds, and its transfer to an island that joins.

Each rank of the joining island receives the tensors from a rank of equal place. Only the joining island waits: the
sending rank serves a copy in a thread while it trains on.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.local_sgd.coordinator.messages import AnchorSources
from deepspeed_compress.local_sgd.exchange import ANCHOR, MOMENTUM, as_bytes
from deepspeed_compress.local_sgd.strategy import ExchangeContext
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import Connection, Limits
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.messages import Count, Fields, Messages
from deepspeed_compress.transport.server import Bounds, Server

VersionedAnchor = tuple[int, Mapping[str, Any], Mapping[str, Tensor]]
"""Version, metadata, and flat fp32 tensors on the host by name."""
CONNECTIONS = 4
"""Maximum number of open connections, each with a copy of the anchor. Others try elsewhere, or again."""
_PAUSE = 0.2
"""Seconds between attempts to get an anchor."""
SLOWEST = 10.0
"""Minimum time limit, in seconds, for a part of an anchor (256 KiB) to be received."""


class _Request(Fields):
    version: Count


class _Anchor(Fields):
    version: Count
    about: dict[str, Any]
    sizes: dict[str, int]


_REQUESTS = Messages({ANCHOR: _Request})
_ANSWERS = Messages({ANCHOR: _Anchor, "none": Fields})


class AnchorServer:
    """Server of the anchor of this rank.

    Args:
        host: address of this machine at which others reach it. The server listens on no other address.
        copy: function from a minimum version to the anchor, once that version is reached; None if there is nothing to
            send. Called by threads of this server.
        timeout: seconds for which a joining island waits, and within which it must receive each part.
    """

    def __init__(self, host: str, copy: Callable[[int], VersionedAnchor | None], timeout: float = SLOWEST) -> None:
        self._copy = copy
        limits, bounds = Limits(head=1 << 12, patience=max(timeout, SLOWEST)), Bounds(CONNECTIONS)
        self._server = Server(ANCHOR, self._serve, host, 0, Credentials.find(), limits, bounds)
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
        found = self._copy(request["version"])
        if found is None:
            connection.send({"kind": "none"})
            return
        version, about, tensors = found
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        head = {"kind": ANCHOR, "version": version, "about": dict(about), "sizes": sizes}
        connection.send_pieces(head, 4 * sum(sizes.values()), map(as_bytes, tensors.values()))


def fetch_anchor(address: str, version: int, timeout: float, sizes: Mapping[str, int], run: str) -> VersionedAnchor:
    """Return the anchor of the rank at `address`, once its version is at least `version`.

    Args:
        address: host and port.
        version: minimum version.
        timeout: seconds to wait for the connection and for each part.
        sizes: expected number of elements of each tensor, by name.
        run: expected run.

    Raises:
        OSError: nothing arrives for `timeout` seconds, the rank does not have that version of the run, something else
            listens there, or too many islands ask.
    """
    size = 4 * sum(sizes.values())
    limits = Limits(body=size, patience=timeout)
    with connect(address, ANCHOR, Credentials.find(), timeout, limits, timeout) as connection:
        connection.send({"kind": ANCHOR, "version": version})
        head = connection.receive(2 * timeout)
        if head is None:
            raise TimeoutError(f"{address} is silent")
        _ANSWERS.read(head)
        known = head["kind"] == ANCHOR and head["about"].get("run") == run and head["sizes"] == sizes
        if not known or head["version"] < version:
            raise ConnectionError(f"{address} does not have version {version} of {run}")
        tensors = {name: torch.empty(numel) for name, numel in sizes.items()}
        for tensor in tensors.values():
            connection.read_into(as_bytes(tensor))
    return int(head["version"]), head["about"], tensors


class SharedAnchor:
    """The anchor of this rank, with its version.

    Args:
        context: the settings, the master weights and the residual stores of this rank.
        publish_metadata: returns metadata that is sent along with the anchor.

    Attributes:
        version: version of the anchor; 0 if there is none.
        run: run of the coordinator.
        failure: reason why the last attempt to fetch the anchor failed.
    """

    def __init__(self, context: ExchangeContext, publish_metadata: Callable[[], Mapping[str, Any]]) -> None:
        self.version, self.run = 0, ""
        self._elastic, self._segments = context.elastic, tuple(context.master_weights.segments)
        self._publish_metadata, stores = publish_metadata, context.reduction.stores
        names = (ANCHOR, MOMENTUM) if context.settings.outer.optimizer == "nesterov" else (ANCHOR,)
        self._stores = {name: stores.get(name, "fp32", scaled=False, transactional=False) for name in names}
        self.failure = "other islands moved on between the requests of two ranks"
        self._change = threading.Condition()

    def copy(self, version: int) -> VersionedAnchor | None:
        """Return the state that a joining island needs, once the anchor is at least of `version`. Thread-safe.

        Returns None if that version is not reached within the timeout.
        """
        with self._change:
            if not self._change.wait_for(lambda: self.version >= max(1, version), self._elastic.timeout_seconds):
                return None
            copy = {name: store.read(self._segments, torch.device("cpu")) for name, store in self._stores.items()}
            return self.version, {**self._publish_metadata(), "run": self.run}, copy

    def withdraw(self) -> None:
        """Stop serving copies, because the anchor is about to be replaced."""
        with self._change:
            self.version = 0

    @contextmanager
    def replacing(self, version: int) -> Iterator[None]:
        """Make no copy while the caller writes the anchor of `version`."""
        with self._change:
            yield
            self.version = version
            self._change.notify_all()

    def write(self, tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """Store the tensors of a fetched anchor, and return the anchor on `device`."""
        for name, store in self._stores.items():
            store.write(self._segments, tensors[name].to(device))
        return tensors[ANCHOR].to(device)

    def fetch(self, sources: AnchorSources, place: int, number: int) -> VersionedAnchor | None:
        """Try one source after another, starting at a different one for each island; None if all fail.

        Args:
            sources: the islands that hold the anchor.
            place: place of this rank in its island.
            number: number of this island.
        """
        count, numel = len(sources.sources), sum(segment.numel for segment in self._segments)
        sizes, timeout = dict.fromkeys(self._stores, numel), self._elastic.timeout_seconds
        for turn in range(count):
            addresses = sources.sources[(number + turn) % count]
            try:
                return fetch_anchor(addresses[place], sources.version, timeout, sizes, self.run)
            except OSError as error:
                self.failure = str(error) or type(error).__name__
        # They may have no room for another connection.
        time.sleep(_PAUSE)
        return None
