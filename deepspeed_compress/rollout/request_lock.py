"""Lock that lets requests run at the same time, and pauses them during an update."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar, cast

from deepspeed_compress.errors import RolloutError

_T = TypeVar("_T")
_POLL_S = 0.005
"""Seconds between two looks of a coroutine for the end of an update. It must not block the event loop of the others."""
_HELD: ContextVar[frozenset["RequestLock"]] = ContextVar("held", default=frozenset())
"""Locks with a request around the present code. A coroutine, and what it starts inside a request, has its own."""


class RequestLock:
    """Readers-writer lock. An update waits for the requests that run, and new requests wait for the update.

    A request inside of another one does not wait, because the update waits for the outer one.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: Counter[int] = Counter()
        """Number of running requests by thread."""
        self._paused = False

    def request(self, value: Callable[[], Any] = lambda: None) -> "Request[Any]":
        """Return a context that keeps updates out of its block, and enters with `value`, which may raise."""
        return Request(self, value)

    def enter(self) -> None:
        """Begin a request, after an update that waits or runs.

        Raises:
            RolloutError: the thread could not wait, because another coroutine of it has a request.
        """
        with self._changed:
            if self._requests[threading.get_ident()] and self not in _HELD.get():
                raise RolloutError(
                    "coroutines of one thread have requests at the same time, between which an update would never run: "
                    'write "async with receiver.request()"'
                )
            self._changed.wait_for(self._admits)
            self._requests[threading.get_ident()] += 1

    async def enter_coroutine(self) -> None:
        """Begin a request of a coroutine in the same way, while others of its thread go on."""
        while True:
            with self._changed:
                if self._admits():
                    self._requests[threading.get_ident()] += 1
                    return
            await asyncio.sleep(_POLL_S)

    def leave(self, thread: int) -> None:
        """End a request that has begun in `thread`."""
        with self._changed:
            self._requests -= Counter([thread])
            self._changed.notify_all()

    def _admits(self) -> bool:
        return not self._paused or self in _HELD.get()

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


class Request(Generic[_T]):
    """Context of one request, for `with`, or in coroutines for `async with`."""

    def __init__(self, lock: RequestLock, value: Callable[[], _T]) -> None:
        self._lock, self._value, self._thread = lock, value, 0
        self._token: Token[frozenset[RequestLock]] | None = None

    def __enter__(self) -> _T:
        self._lock.enter()
        return self._begin()

    async def __aenter__(self) -> _T:
        await self._lock.enter_coroutine()
        return self._begin()

    def _begin(self) -> _T:
        self._thread = threading.get_ident()
        try:
            value = self._value()
        except BaseException:
            self._lock.leave(self._thread)
            raise
        self._token = _HELD.set(_HELD.get() | {self._lock})
        return value

    def __exit__(self, *_: object) -> None:
        # A web framework may leave the block in another thread, which has another context.
        with suppress(ValueError):
            _HELD.reset(cast("Token[frozenset[RequestLock]]", self._token))
        self._lock.leave(self._thread)

    async def __aexit__(self, *_: object) -> None:
        self.__exit__()
