"""Lock that lets requests run at the same time, and pauses them during an update."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class RequestLock:
    """Readers-writer lock. An update waits for the requests that run, and new requests wait for the update.

    A request in a thread that already has one does not wait, because the update waits for that thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: Counter[int] = Counter()
        """Number of running requests by thread."""
        self._paused = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep updates out of the block."""
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._paused or self._requests[thread])
            self._requests[thread] += 1
        try:
            yield
        finally:
            with self._changed:
                self._requests -= Counter([thread])
                self._changed.notify_all()

    @property
    def is_held_here(self) -> bool:
        """Return True if this thread has a request, for which its own update would wait forever."""
        with self._changed:
            return self._requests[threading.get_ident()] > 0

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep requests, and other updates, out of the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused)
            self._paused = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._requests)
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()
