"""Messages between islands and their coordinator: heads of the transport's frames, without bodies.

An island sends `join`, `beat`, `ready` (it has an anchor), `claim` (it has loaded one from a checkpoint), `arrive` (it
requests an exchange), `vote` (whether its exchange succeeded), `sources` (it requests the islands that hold the newest
anchor), and `leave`. A user sends `forget` (islands to remove for good). The coordinator answers `welcome`,
`refused`, `anchor`, `round`, `over`, `outcome`, `waiting`, and sends `open` unasked. An island that has lost its
connection sends `join` again and repeats unanswered requests, so every message may arrive twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Message = Mapping[str, Any]
COORDINATOR = "coordinator"
"""Name of the service."""


@dataclass(frozen=True)
class Partner:
    """Island in a round.

    Attributes:
        number: number of the island.
        samples: samples that it has processed since its last exchange.
        version: version of its anchor.
        store: "host:port" of the store on its rank 0 through which process groups are made.
    """

    number: int
    samples: int
    version: int
    store: str


@dataclass(frozen=True)
class Round:
    """Exchange between islands.

    Attributes:
        id: number of the round, and version of the resulting anchor.
        base: version of the newest anchor.
        fresh: prefix of the names under which its process groups are made.
        partners: the islands in order of their numbers.
    """

    id: int
    base: int
    fresh: str
    partners: tuple[Partner, ...]

    @classmethod
    def of(cls, message: Message) -> "Round":
        partners = tuple(Partner(**one) for one in message["partners"])
        return cls(message["id"], message["base"], message["fresh"], partners)

    def message(self) -> dict[str, Any]:
        return {"kind": "round", **asdict(self)}

    def place(self, number: int) -> int:
        """Return the position of the island `number` among the partners."""
        return next(place for place, one in enumerate(self.partners) if one.number == number)

    def weight(self, number: int) -> float:
        """Return the weight of the island `number`, 1 on average; 0 for all islands if none has any samples."""
        total = sum(one.samples for one in self.partners)
        return len(self.partners) * self.partners[self.place(number)].samples / total if total else 0.0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a round."""

    id: int
    committed: bool


@dataclass(frozen=True)
class AnchorSources:
    """Islands that hold the newest anchor.

    Attributes:
        version: version of the anchor; 0 if there is none, so that the island begins with its own weights.
        addresses: for each such island, an address "host:port" for every rank.
    """

    version: int
    addresses: Sequence[Sequence[str]]
