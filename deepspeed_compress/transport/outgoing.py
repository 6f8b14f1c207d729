"""Messages to one client that nobody waits for: a bounded queue, and the thread that writes it."""

import threading
import time
from collections import deque
from collections.abc import Iterable

from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.frames import Head, encode

__all__ = ["Outgoing", "flush_all"]


class Outgoing:
    """Sends heads over `connection`, in order, without ever blocking who puts them.

    A client that does not read gets disconnected once the queue is full: its answers never fill memory.

    Args:
        connection: that nobody else sends over.
        count: most messages that wait.
        size: most bytes that wait, if there is more than one message.
    """

    def __init__(self, connection: Connection, count: int = 1024, size: int = 1 << 22) -> None:
        self._connection, self._count, self._size = connection, count, size
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._change = threading.Condition()
        self._ended = False
        threading.Thread(target=self._write, daemon=True).start()

    def put(self, head: Head) -> bool:
        """Return whether `head` is going to be sent; False if the connection has ended, or ends by this."""
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
        """Write nothing more. Does not wait."""
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


def flush_all(queues: Iterable[Outgoing], seconds: float) -> None:
    """Flush all of `queues` within `seconds` together."""
    deadline = time.monotonic() + seconds
    for queue in queues:
        queue.flush(max(0.0, deadline - time.monotonic()))
