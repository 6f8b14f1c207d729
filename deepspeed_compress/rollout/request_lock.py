"""Lock that lets requests run at the same time, and pauses them during an update."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from deepspeed_compress.errors import RolloutError

_POLL_S = 0.005
"""Seconds between two looks of a coroutine for the end of an update. It must not block the event loop of the others."""


class RequestLock:
    """Readers-writer lock. An update waits for the requests that run, and new requests wait for the update."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: list[int] = []
        """Thread of each running request."""
        self._paused = False

    @contextmanager
    def request(self) -> Iterator[None]:
        """Keep updates out of the block.

        Raises:
            RolloutError: an update waits for another request of this thread, which could then never end.
        """
        thread = threading.get_ident()
        with self._changed:
            if self._paused and thread in self._threads:
                raise RolloutError("an update waits for another request of this thread: requests do not nest")
            self._changed.wait_for(lambda: not self._paused)
            self._threads.append(thread)
        try:
            yield
        finally:
            self._end(thread)

    @asynccontextmanager
    async def coroutine_request(self) -> AsyncIterator[None]:
        """Keep updates out of the block of a coroutine. Others of its thread go on while it waits for an update."""
        thread = threading.get_ident()
        while True:
            with self._changed:
                if not self._paused:
                    self._threads.append(thread)
                    break
            await asyncio.sleep(_POLL_S)
        try:
            yield
        finally:
            self._end(thread)

    def _end(self, thread: int) -> None:
        with self._changed:
            self._threads.remove(thread)
            self._changed.notify_all()

    @property
    def is_held_here(self) -> bool:
        """Return True if this thread has a request, for which its own update would wait forever."""
        return threading.get_ident() in self._threads

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Keep requests, and other updates, out of the block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._paused)
            self._paused = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._threads)
            yield
        finally:
            with self._changed:
                self._paused = False
                self._changed.notify_all()
