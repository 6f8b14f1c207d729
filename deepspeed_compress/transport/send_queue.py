"""Queue of messages to one client: bounded, written by its own thread, never blocking the sender."""

import threading
import time
from collections import deque
from collections.abc import Iterable

from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.frames import Head, encode


class SendQueue:
    """Queue that sends heads over `connection`, in order, without blocking the caller.

    A client that does not read is disconnected once the queue is full, so its answers never fill memory.

    Args:
        connection: connection that nothing else sends over.
        count: largest number of waiting messages.
        size: largest number of waiting bytes, if there is more than one message.
    """

    def __init__(self, connection: Connection, count: int = 1024, size: int = 1 << 22) -> None:
        self._connection, self._count, self._size = connection, count, size
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._change = threading.Condition()
        self._ended = False
        threading.Thread(target=self._write, daemon=True).start()

    def put(self, head: Head) -> bool:
        """Queue `head`.

        Return False if it will not be sent, because the connection has ended, or is ended by this call.
        """
        frame = encode(head)
        with self._change:
            full = bool(self._waiting) and (len(self._waiting) >= self._count or self._bytes + len(frame) > self._size)
            if full:
                self._connection.end()
            if full or self._ended:
                return False
            self._waiting.append(frame)
            self._bytes += len(frame)
            self._change.notify_all()
        return True

    def flush(self, seconds: float) -> None:
        """Wait until everything is written, at most `seconds`."""
        with self._change:
            self._change.wait_for(lambda: not self._bytes or self._ended, seconds)

    def end(self) -> None:
        """Stop writing. Does not wait."""
        with self._change:
            self._ended = True
            self._change.notify_all()

    def _write(self) -> None:
        while (frame := self._next()) is not None:
            try:
                self._connection.send_encoded(frame)
            except OSError:
                self.end()
            with self._change:
                self._bytes -= len(frame)
                self._change.notify_all()

    def _next(self) -> bytes | None:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._ended)
            return None if self._ended else self._waiting.popleft()


def flush_all(queues: Iterable[SendQueue], seconds: float) -> None:
    """Flush all of `queues` within `seconds` together."""
    deadline = time.monotonic() + seconds
    for queue in queues:
        queue.flush(max(0.0, deadline - time.monotonic()))
