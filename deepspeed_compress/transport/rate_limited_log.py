"""Rate-limited log lines about other processes: a flood of connections must not fill a log."""

import threading
import time
from collections.abc import Callable


def ignore(text: str) -> None:
    """Discard the line."""


class RateLimitedLog:
    """Log that passes at most one line per `every` seconds to `log`. The next line reports how many were omitted."""

    def __init__(self, log: Callable[[str], None], every: float = 5.0) -> None:
        self._log, self._every = log, every
        self._lock = threading.Lock()
        self._next, self._omitted = 0.0, 0

    def __call__(self, text: str) -> None:
        """Log `text`, or count it as omitted."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._omitted += 1
                return
            more = f" ({self._omitted} more since the last line)" if self._omitted else ""
            self._next, self._omitted = now + self._every, 0
        self._log(text + more)
