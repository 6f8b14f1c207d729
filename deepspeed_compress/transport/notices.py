"""Rate-limited log lines about other processes: a flood of connections must not fill a log."""

import threading
import time
from collections.abc import Callable

__all__ = ["Notices", "ignore"]


def ignore(text: str) -> None:
    """Discard the line."""


class Notices:
    """Log that passes at most one line in `every` seconds to `tell`. The next line reports how many were omitted."""

    def __init__(self, tell: Callable[[str], None], every: float = 5.0) -> None:
        self._tell, self._every = tell, every
        self._lock = threading.Lock()
        self._next, self._left_out = 0.0, 0

    def __call__(self, text: str) -> None:
        """Log `text`, or count it as omitted."""
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                self._left_out += 1
                return
            more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
            self._next, self._left_out = now + self._every, 0
        self._tell(text + more)
