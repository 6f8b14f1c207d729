"""Reception of published weights by a module that generates with them."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout.module_weights import ModuleWeights
from deepspeed_compress.rollout.parts import PartEntry, SliceDigest, read_part
from deepspeed_compress.rollout.request_lock import RequestLock
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import Manifest, find_versions, read_manifest

_LOG = logging.getLogger(__name__)
_IN_MEMORY = 1 << 30
"""Bytes of changes that are fetched before requests are paused. More than that is fetched and applied part by part."""
_PAUSE = 10.0
"""Pause after a failed update, in multiples of its time: requests that wait for updates lose a tenth of their time."""
_LONGEST_PAUSE = 60.0
"""Longest such pause in seconds, after which new weights would be late when the store is back."""


_Path = tuple[Sequence[PartEntry], Sequence[PartEntry]]
"""Parts that lead to the newest version: those of a full copy with which the path begins (none if it begins with the
held version), and those with the changes of the versions after that, in order."""


class Receiver:
    """Receiver of the newest published version in a module, bit for bit.

    The module may have the published type or a wider one, on any device. The first update takes a full copy. A later
    one applies the changes of all versions since the held one, or takes a newer full copy if that is smaller.

    Args:
        module: the module, with the parameter names of the published model. Tied parameters may have any of their
            names.
        store: storage that the publishing ranks write to.

    Attributes:
        version: the held version; None before the first update, or after one that failed midway.
        digest: model digest of the held version.

    Examples:
        >>> receiver = Receiver(model, DirectoryStore("/shared/policy"))
        >>> receiver.update()
        >>> with receiver.request():
        ...     model.generate(prompt)
    """

    def __init__(
        self,
        module: nn.Module,
        store: Store,
        listener: Callable[[str, NDArray[np.int64] | None], None] = lambda name, positions: None,
    ) -> None:
        self.version: int | None = None
        self.digest = ""
        self._listener = listener
        self._module, self._store = module, store
        self._lock = RequestLock()

    @contextmanager
    def request(self) -> Iterator[int]:
        """Keep updates out of the block, which uses the module, and yield the held version. Requests do not nest.

        Raises:
            RolloutError: no version is held, or an update waits for another request of this thread.
        """
        with self._lock.request():
            if self.version is None:
                raise RolloutError("the module holds no version: call update() until it returns True")
            yield self.version

    def update(self, version: int | None = None) -> bool:
        """Bring the module to a version. Call it from one thread.

        Up to 1 GiB of changes are fetched and checked while requests run, which are paused only to apply them. If a
        part is damaged or missing, or the result is not what the publisher holds, take a full copy instead.

        Args:
            version: number of a complete version; None for the newest one.

        Returns:
            True if the module changed; False if it already has the version, or there is none.

        Raises:
            RolloutError: the version cannot be reached, or this thread is inside `request()`. `version` is None
                if the module has been changed.
            OSError: the store cannot be read, for example because its server does not answer. The same holds then.
        """
        if self._lock.is_held_here:
            raise RolloutError("update() inside request() would wait for itself: call it after the block")
        target = version or max(find_versions(self._store), default=None)
        if target is None:
            return False
        manifest = read_manifest(self._store, target)
        if (self.version, self.digest) == (target, manifest.digest):
            return False
        problems = []
        for path in sorted(self._find_paths(manifest), key=lambda path: _size(*path)):
            try:
                self._follow(*path, manifest)
                return True
            except RolloutError as error:
                problems.append(str(error))
        reasons = "; ".join(problems) or "no full copy leads to it"
        raise RolloutError(f"version {target} cannot be reached: {reasons}")

    def _find_paths(self, newest: Manifest) -> Iterator[_Path]:
        """Yield the path from the held version and the path from the newest full copy, as far as they exist."""
        changes: list[PartEntry] = []
        needs_full = True
        for manifest in self._walk_back(newest):
            if needs_full and manifest.full is not None:
                needs_full = False
                yield manifest.full, tuple(changes)
            if manifest.changes is not None:
                changes = [*manifest.changes.parts, *changes]
                if (manifest.changes.base, manifest.changes.base_digest) == (self.version, self.digest):
                    yield (), tuple(changes)
            passed = self.version is None or manifest.version <= self.version + 1
            if passed and not needs_full:
                return

    def _walk_back(self, manifest: Manifest) -> Iterator[Manifest]:
        """Yield `manifest`, and those of the versions that it builds on, as far as they are in the store."""
        yield manifest
        while manifest.changes is not None:
            base = manifest.changes
            try:
                manifest = read_manifest(self._store, base.base)
            except RolloutError:
                return
            if manifest.digest != base.base_digest:
                return
            yield manifest

    def _follow(self, full: Sequence[PartEntry], changes: Sequence[PartEntry], newest: Manifest) -> None:
        """Bring the module to `newest`.

        Raises:
            RolloutError: a part is damaged or missing, or the result differs from `newest`.
        """
        weights = ModuleWeights(self._module, newest)
        # Changes are mostly small. Of a full copy, or of many changes, one part is in memory at a time.
        lazy = (read_part(self._store, part) for part in changes)
        changed = lazy if _size(changes) > _IN_MEMORY else list(lazy)
        with self._lock.pause():
            held: dict[tuple[str, int], SliceDigest] = {}
            whole = (read_part(self._store, part) for part in full)
            for one in chain.from_iterable(chain(whole, changed)):
                self.version = None
                self._listener(one.slice.name, weights.apply(one))
                held[one.slice.name, one.slice.start] = one.slice
            weights.verify(list(held.values()))
            self.version, self.digest = newest.version, newest.digest


def _size(*parts: Sequence[PartEntry]) -> int:
    return sum(part.size for part in chain(*parts))


class Updatable(Protocol):
    """Weights that follow a store: those of a `Receiver`, or of a server.

    Attributes:
        version: the held version; None if no complete one is held.
    """

    version: int | None

    def update(self) -> object:
        """Take the newest version. Raises RolloutError or OSError if it cannot be reached."""


class Updates:
    """Updates that survive an outage: while the store cannot be read, the held version stays in use.

    Answers name this version, so the learner decides how far behind is too far. An outage is logged when it begins.

    Examples:
        >>> update = Updates(Receiver(model, store))
        >>> version = update()  # between two requests
    """

    def __init__(self, weights: Updatable) -> None:
        self._weights, self._is_away, self._next = weights, False, 0.0

    def __call__(self) -> int:
        """Take the newest version if the store can be read. Return the held one, 0 before the first.

        Raises:
            RolloutError: the update failed, and no complete version is held.
            OSError: the same, because of the store.
        """
        version, begin = self._weights.version, time.monotonic()
        if version is not None and begin < self._next:
            return version
        try:
            self._weights.update()
            self._is_away = False
        except (RolloutError, OSError) as error:
            version, end = self._weights.version, time.monotonic()
            if version is None:
                raise
            if not self._is_away:
                _LOG.warning("The weights cannot be updated, so version %d goes on answering: %s", version, error)
            self._is_away, self._next = True, end + min(_PAUSE * (end - begin), _LONGEST_PAUSE)
        return self._weights.version or 0
