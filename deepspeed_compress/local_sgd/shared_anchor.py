"""The anchor of an island that exchanges in rounds: it is served to islands that join, and taken from other islands.

Only the joining island waits. The others serve a copy of their anchor from a thread while they train on (`anchors`).
"""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Condition
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.errors import IslandError
from deepspeed_compress.local_sgd.anchors import AnchorCopy, VersionedAnchor, fetch_anchor
from deepspeed_compress.local_sgd.coordinator.messages import AnchorSources
from deepspeed_compress.local_sgd.exchange import ANCHOR, MOMENTUM, AnchorState
from deepspeed_compress.local_sgd.strategy import ExchangeContext


class SharedAnchor:
    """The anchor of this rank, with its version.

    Args:
        context: the settings, the master weights and the residual stores of this rank.
        publish_metadata: returns metadata that is sent along with the anchor.

    Attributes:
        version: version of the anchor; 0 if there is none.
        run: run of the coordinator.
    """

    def __init__(self, context: ExchangeContext, publish_metadata: Callable[[], Mapping[str, Any]]) -> None:
        self.version, self.run = 0, ""
        self._elastic, self._segments = context.elastic, tuple(context.master_weights.segments)
        self._publish_metadata, state = publish_metadata, AnchorState(context.reduction.stores)
        self._stores = {ANCHOR: state.anchor}
        if context.settings.outer.optimizer == "nesterov":
            self._stores[MOMENTUM] = state.momentum
        self._copy: weakref.ref[AnchorCopy] | None = None
        """Copy of the anchor that is being served, shared by all requests."""
        self._failure = "other islands moved on between the requests of two ranks"
        """Reason why the last attempt to fetch the anchor failed."""
        self._change = Condition()

    def copy(self, version: int) -> VersionedAnchor | None:
        """Return the state that a joining island needs, once the anchor is at least of `version`. Thread-safe.

        Returns None if that version is not reached within the timeout.
        """
        with self._change:
            if not self._change.wait_for(lambda: self.version >= max(1, version), self._elastic.timeout_seconds):
                return None
            copy = self._copy() if self._copy is not None else None
            if copy is None:
                device = torch.device("cpu")
                copy = AnchorCopy({name: one.read(self._segments, device) for name, one in self._stores.items()})
                self._copy = weakref.ref(copy)
            return self.version, {**self._publish_metadata(), "run": self.run}, copy

    def withdraw(self) -> None:
        """Stop serving copies, because the anchor is about to be replaced."""
        with self._change:
            self.version, self._copy = 0, None

    @contextmanager
    def replacing(self, version: int) -> Iterator[None]:
        """Make no copy while the caller writes the anchor of `version`."""
        with self._change:
            yield
            self.version, self._copy = version, None
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
                self._failure = str(error) or type(error).__name__
        return None

    def check_deadline(self, deadline: float, sources: AnchorSources) -> None:
        """Raise IslandError if `deadline` is over, with the reason why no anchor could be fetched from `sources`."""
        if time.monotonic() > deadline:
            raise IslandError(
                f"/deepspeed_compress/islands/elastic/give_up: none of {len(sources.sources)} islands provided the "
                f"anchor within {self._elastic.give_up} ({self._failure}); islands must reach each other, not only the "
                "coordinator: open the ports between them"
            )
