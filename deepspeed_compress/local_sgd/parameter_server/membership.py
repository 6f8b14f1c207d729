"""Islands that take part: those that are known and have not left, connected or not."""

import hmac
import time
from dataclasses import dataclass

from deepspeed_compress.local_sgd.parameter_server.records import Records
from deepspeed_compress.transport.connection import Connection


@dataclass(frozen=True)
class Room:
    """Limit on the number of remembered islands. A forgotten island must enter as a new one.

    Attributes:
        islands: Largest number of islands.
        quiet: Seconds of silence after which an island may be forgotten even if it has not left.
    """

    islands: int = 1000
    quiet: float = 3600.0


DEFAULT_ROOM = Room()


class Membership:
    """Signs of life of islands. Not thread-safe."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._connected: dict[int, Connection] = {}
        self._heard: dict[int, float] = {}
        self._begun = time.monotonic()

    def record_call(self, number: int, caller: Connection) -> None:
        """Record a call of island `number`."""
        self._connected[number], self._heard[number] = caller, time.monotonic()

    def is_connected(self, number: int) -> bool:
        """Return True if the first rank of an island is connected."""
        return number in self._connected

    def lose(self, caller: Connection) -> list[int]:
        """Record that a connection has ended. Return the islands that it belonged to, which may call again."""
        found = [number for number, one in self._connected.items() if one is caller]
        for number in found:
            self.disconnect(number)
        return found

    def disconnect(self, number: int) -> None:
        """Record that an island has disconnected."""
        self._connected.pop(number, None)
        self._heard[number] = time.monotonic()

    def forget(self, number: int) -> None:
        """Forget an island."""
        self._connected.pop(number, None)
        self._heard.pop(number, None)

    def make_room(self, records: Records) -> list[int]:
        """Return the islands to forget when one more enters: those that have left, then those that fell silent.

        Raises:
            ValueError: if too many of them are alive.
        """
        islands = records.islands
        excess = len(islands) + 1 - self._room.islands
        if excess <= 0:
            return []
        longest_ago = sorted(islands, key=lambda number: (not islands[number].has_left, self._last(number)))
        dead = [number for number in longest_ago if islands[number].has_left or not self._is_alive(number)][:excess]
        if len(dead) < excess:
            raise ValueError(
                f"there are {len(islands)} islands (allowed: {self._room.islands}); stop some of them, or wait "
                f"{self._room.quiet:g} s after the last call of those that died"
            )
        return dead

    def _last(self, number: int) -> float:
        return self._heard.get(number, self._begun)

    def _is_alive(self, number: int) -> bool:
        return number in self._connected or time.monotonic() - self._last(number) < self._room.quiet


def check_holder(records: Records, number: int, token: object) -> None:
    """Raise ValueError unless the sender is the process that entered or resumed island `number` last."""
    island = records.islands.get(number)
    if island is None:
        raise ValueError(f"island {number} is not known to this server")
    if not isinstance(token, str) or not token or not hmac.compare_digest(token.encode(), island.token.encode()):
        raise ValueError(f"another process has entered or resumed island {number}")
    if island.has_left:
        raise ValueError(f"island {number} has left")
