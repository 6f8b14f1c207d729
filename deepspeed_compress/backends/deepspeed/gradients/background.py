"""Reductions next to the work of the program: in a thread on CPU, on a stream of their own on GPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any

from deepspeed.accelerator import get_accelerator

from deepspeed_compress.collectives.payload import PendingMeans


class Background:
    """Place where buckets are sent, and where their means return, next to the work of the program.

    This one does nothing: means return when they are asked for.

    Attributes:
        returns_early: True if means return before `finish`. They overwrite a part of what was sent.
    """

    returns_early = False

    def filling(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are copied and compared."""
        return nullcontext()

    def sending(self) -> AbstractContextManager[None]:
        """Return a context in which copies are compressed and sent."""
        return nullcontext()

    def add(self, pending: PendingMeans) -> None:
        """Send the means of a bucket that was just sent back, as soon as the parts of all ranks are there."""

    def finish(self) -> None:
        """Send back everything that was added. Afterwards the program may use the buckets.

        Raises:
            Exception: the first error in the background, such as a lost peer.
        """


class MeansThread(Background):
    """Thread that waits for the parts of one bucket after the other, in the order of `add`, until `finish`.

    Nothing else may use a bucket meanwhile.
    """

    returns_early = True

    def __init__(self) -> None:
        self._queue: SimpleQueue[PendingMeans | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread: Thread | None = None

    def add(self, pending: PendingMeans) -> None:
        if self._thread is None:
            # A rank that fails must be able to exit, although its peers send nothing any more.
            self._thread = Thread(target=self._run, name="means", daemon=True)
            self._thread.start()
        self._queue.put(pending)

    def finish(self) -> None:
        if self._thread is None:
            return
        self._queue.put(None)
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        try:
            while (pending := self._queue.get()) is not None:
                pending.send_back()
        except BaseException as error:
            self._error = error


class MeansStream(Background):
    """Stream of a GPU on which buckets are compressed and summed. The host waits for nothing.

    Gradients are copied on the stream that has written them, so that they may change or be freed while messages travel.
    The means of a bucket are sent back after the next bucket has left, so that the network is not idle between the two.

    Args:
        producer: the stream that writes gradients; None for the current one.
    """

    returns_early = True

    def __init__(self, producer: Any) -> None:
        self._stream = get_accelerator().Stream()
        self._producer = producer
        self._newest: PendingMeans | None = None

    @contextmanager
    def filling(self) -> Iterator[None]:
        if self._producer is None:
            yield
            return
        self._producer.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(self._producer):
            yield

    @contextmanager
    def sending(self) -> Iterator[None]:
        self._stream.wait_stream(self._producer or get_accelerator().current_stream())
        with get_accelerator().stream(self._stream):
            yield

    def add(self, pending: PendingMeans) -> None:
        before, self._newest = self._newest, pending
        if before is not None:
            before.send_back()

    def finish(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            with self.sending():
                newest.send_back()
        get_accelerator().current_stream().wait_stream(self._stream)
