"""Which copies of checkpoints move, so that an end waits for them, and for no silent peer."""

import time
from typing import Any

__all__ = ["DRAIN", "LOOK", "Movement"]

DRAIN = 30.0
"""Most seconds for which an end waits for copies that move."""
STILL = 2.0
"""Seconds after which a copy does not move any more."""
LOOK = 0.1
"""Seconds between looks at copies that move."""


class Movement:
    """When copies moved last, by what carries them. For several threads."""

    def __init__(self) -> None:
        self._last: dict[object, float] = {}

    def begin(self, carrier: object) -> None:
        """Take note of one that has yet to begin: nobody waits for it."""
        self._last[carrier] = -STILL

    def note(self, carrier: object) -> None:
        """Take note that it moves."""
        self._last[carrier] = time.monotonic()

    def end(self, carrier: object) -> None:
        """Take note that it has ended."""
        self._last.pop(carrier, None)

    def still(self) -> list[Any]:
        """Return those that do not move any more."""
        now = time.monotonic()
        return [one for one, last in list(self._last.items()) if now - last >= STILL]

    def wait(self) -> None:
        """Wait while a copy moves, at most `DRAIN` seconds."""
        deadline = time.monotonic() + DRAIN
        while len(self._last) > len(self.still()) and time.monotonic() < deadline:
            time.sleep(LOOK)
