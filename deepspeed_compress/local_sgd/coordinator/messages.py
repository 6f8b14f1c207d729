"""Messages between islands and their coordinator: heads of the transport's frames, without bodies.

An island sends `join` (again after a lost connection), `beat`, `ready` (it has an anchor), `claim` (it has loaded one
from a checkpoint), `arrive` (it requests an exchange), `vote` (whether its exchange succeeded), `sources` (it requests
the islands that hold the newest anchor), and `leave`. A user sends `forget` (islands to remove for good). The
coordinator answers `welcome`, `refused`, `anchor`, `round`, `over`, `outcome`, `waiting`, and sends `open` unasked. An
island repeats unanswered requests after it has joined again, so every message may arrive twice.
"""

import math
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from deepspeed_compress.transport.messages import Address, Count, Fields, Messages, Name, Text

COORDINATOR = "coordinator"
"""Name of the service."""
_RANKS = 1 << 16
"""Most ranks of an island, and most islands."""


def _checked_terms(terms: dict[str, Any]) -> dict[str, Any]:
    """Return `terms`. Raises ValueError if those that a coordinator uses are wrong."""
    timeout, minimum = terms.get("timeout", 1.0), terms.get("minimum", 1)
    if type(timeout) not in (int, float) or not 0 < timeout <= 1e9 or not math.isfinite(timeout):
        raise ValueError(f"timeout is {timeout!r} (allowed: seconds, more than 0 and up to 1e9)")
    if type(minimum) is not int or not 1 <= minimum <= 1 << 20:
        raise ValueError(f"minimum is {minimum!r} (allowed: an integer from 1 to {1 << 20})")
    return terms


class Join(Fields):
    """Connection of an island, for the first time or again. `number` and `run` are those from its first `welcome`."""

    name: Address = ""
    terms: Annotated[dict[str, Any], AfterValidator(_checked_terms)]
    store: Address
    addresses: Annotated[list[Address], Field(max_length=_RANKS)]
    process: Address = ""
    version: Count = 0
    run: Address | None = None
    number: Count | None = None
    give_up: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Seconds for which the island waits for a coordinator that it cannot reach."""

    @model_validator(mode="after")
    def _known_by_both(self) -> Self:
        if (self.run is None) != (self.number is None):
            raise ValueError("run and number belong together")
        return self


class Ready(Fields):
    """Report that the island has the anchor of `version`; 0 for none."""

    version: Count


class Claim(Fields):
    """Report that the island has loaded the anchor that island `number` of `run` saved; -1 if no island did."""

    run: Address
    number: Annotated[int, Field(ge=-1, le=1 << 53)] = -1
    version: Annotated[int, Field(ge=0, le=1 << 40)]
    """Rounds are numbered from it, so it stays far below the largest number of a message."""


class Arrive(Fields):
    """Request to exchange the weight changes of `samples` samples since the anchor of `version`."""

    version: Count
    samples: Count


class Vote(Fields):
    """Report whether the exchange of `round` was `ok`."""

    round: Count
    ok: bool


class Forget(Fields):
    """Request of a user to remove the islands `numbers` for good."""

    numbers: Annotated[list[Count], Field(max_length=_RANKS)]


FROM_ISLANDS = Messages(
    {
        "join": Join,
        "beat": Fields,
        "ready": Ready,
        "claim": Claim,
        "arrive": Arrive,
        "vote": Vote,
        "sources": Fields,
        "leave": Fields,
        "forget": Forget,
    }
)


class Welcome(Fields):
    """Answer to an island that has joined, with the unique number of the island in this run."""

    run: Name
    number: Count


class Why(Fields):
    """Reason for which an island waits."""

    why: Text


class Refused(Fields):
    """Reason for which an island may not join."""

    why: Annotated[str, Field(max_length=1 << 16)]


class AnchorSources(Fields):
    """Islands that hold the newest anchor.

    Attributes:
        version: version of the anchor; 0 if there is none, so that the island begins with its own weights.
        sources: for each such island, an address "host:port" for every rank.
    """

    version: Count
    sources: Annotated[list[Annotated[list[Address], Field(max_length=_RANKS)]], Field(max_length=_RANKS)]


class Partner(Fields):
    """Island in a round.

    Attributes:
        number: number of the island.
        samples: samples that it has processed since its last exchange.
        version: version of its anchor.
        store: "host:port" of the store on its rank 0 through which process groups are made.
    """

    number: Count
    samples: Count
    version: Count
    store: Address


class Round(Fields):
    """Exchange between islands.

    Attributes:
        id: number of the round, and version of the resulting anchor.
        base: version of the newest anchor.
        fresh: prefix of the names under which its process groups are made.
        partners: the islands in order of their numbers.
    """

    id: Count
    base: Count
    fresh: Text
    partners: Annotated[list[Partner], Field(max_length=_RANKS)]

    def place(self, number: int) -> int:
        """Return the position of the island `number` among the partners."""
        return next(place for place, partner in enumerate(self.partners) if partner.number == number)

    def weight(self, number: int) -> float:
        """Return the weight of the island `number`, 1 on average; 0 for all islands if none has any samples."""
        total = sum(partner.samples for partner in self.partners)
        return len(self.partners) * self.partners[self.place(number)].samples / total if total else 0.0


class Outcome(Fields):
    """Outcome of a round."""

    id: Count
    committed: bool


FROM_COORDINATOR = Messages(
    {
        "welcome": Welcome,
        "refused": Refused,
        "waiting": Why,
        "anchor": AnchorSources,
        "round": Round,
        "outcome": Outcome,
        "over": Fields,
        "open": Fields,
        "beat": Fields,
    }
)
