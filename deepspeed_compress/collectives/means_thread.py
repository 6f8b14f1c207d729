"""A thread that carries out the second half of all-reduces while the program computes."""

from queue import SimpleQueue
from threading import Thread

from deepspeed_compress.collectives.payload import PendingMeans


class MeansThread:
    """Thread that sends the means of buckets back, in the order of `add`, until `finish`.

    It waits for the other ranks' parts of one bucket after the other. Nothing else may use a bucket meanwhile.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[PendingMeans | None] = SimpleQueue()
        self._error: BaseException | None = None
        # A rank that fails must be able to exit, although its peers send nothing any more.
        self._thread = Thread(target=self._run, name="means", daemon=True)
        self._thread.start()

    def add(self, pending: PendingMeans) -> None:
        """Send the means of `pending` back once the parts of all ranks are there."""
        self._queue.put(pending)

    def finish(self) -> None:
        """Wait until everything that was added is sent, and end the thread.

        Raises:
            Exception: the first error in the thread, such as a lost peer.
        """
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (pending := self._queue.get()) is not None:
                pending.send_back()
        except BaseException as error:
            self._error = error
