"""Tracking of copies that are advancing, so that shutdown waits for them but not for silent peers."""

import time
from typing import Any

DRAIN = 30.0
"""Maximum number of seconds for which shutdown waits for advancing copies."""
STILL = 2.0
"""Number of seconds without progress after which a copy is considered stalled."""
LOOK = 0.1
"""Number of seconds between checks of the copies."""


class Movement:
    """Times at which copies last advanced, by carrier. For use by several threads."""

    def __init__(self) -> None:
        self._last: dict[object, float] = {}

    def begin(self, carrier: object) -> None:
        """Register a copy that has not started. It counts as stalled, so shutdown does not wait for it."""
        self._last[carrier] = -STILL

    def note(self, carrier: object) -> None:
        """Record that a copy has advanced."""
        self._last[carrier] = time.monotonic()

    def end(self, carrier: object) -> None:
        """Record that a copy has ended."""
        self._last.pop(carrier, None)

    def still(self) -> list[Any]:
        """Return the carriers of stalled copies."""
        now = time.monotonic()
        return [one for one, last in list(self._last.items()) if now - last >= STILL]

    def wait(self) -> None:
        """Wait while any copy is advancing, at most `DRAIN` seconds."""
        deadline = time.monotonic() + DRAIN
        while len(self._last) > len(self.still()) and time.monotonic() < deadline:
            time.sleep(LOOK)
