"""Messages between islands and their coordinator: heads of frames of the transport, without bodies.

An island says: `join`, `beat`, `ready` (it has an anchor), `claim` (it has loaded one from a checkpoint), `arrive` (it
wants to exchange), `vote` (how its exchange went), `sources` (who has the newest anchor), `leave`. A user says `forget`
(islands that are gone for ever). The coordinator
answers `welcome`, `refused`, `anchor`, `round`, `over`, `outcome`, `waiting`, and says `open` by itself. Whoever lost a
connection says `join` again and repeats what was not answered: all of it may be said twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["COORDINATOR", "Anchor", "Message", "Outcome", "Partner", "Round"]

Message = Mapping[str, Any]
COORDINATOR = "coordinator"
"""Name of the service."""


@dataclass(frozen=True)
class Partner:
    """An island in a round. `samples`: that it has processed since it last exchanged. `version`: of its anchor.
    `store`: "host:port" at which its rank 0 keeps the store by which groups are made."""

    number: int
    samples: int
    version: int
    store: str


@dataclass(frozen=True)
class Round:
    """An exchange of `partners`, in order of their numbers. `base`: the version of the newest anchor. What comes out of
    it has version `id`. `fresh` begins the names under which its groups are made."""

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
        """Of the island `number` among the partners."""
        return next(place for place, one in enumerate(self.partners) if one.number == number)

    def weight(self, number: int) -> float:
        """What the island `number` counts by, 1 on average; 0 for all where nobody has anything that counts."""
        total = sum(one.samples for one in self.partners)
        return len(self.partners) * self.partners[self.place(number)].samples / total if total else 0.0


@dataclass(frozen=True)
class Outcome:
    """Of a round: whether it counts."""

    id: int
    committed: bool


@dataclass(frozen=True)
class Anchor:
    """Who has the anchor of `version`: for each such island an address "host:port" for every rank. 0: there is none,
    and the one who is told so begins with its own."""

    version: int
    sources: Sequence[Sequence[str]]
