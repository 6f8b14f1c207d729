"""What a coordinator knows: of islands, of the round that runs, and what must outlive it."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.services.rendezvous.wire import Message, Round

__all__ = ["Island", "Running", "Saved"]

KEPT = 1000
"""Versions that are remembered: an island that comes back after more exchanges counts as a new one."""


@dataclass
class Saved:
    """What must outlive the coordinator. `terms`: what islands must agree upon. `version`: of the newest anchor.
    `lineage`: versions that it comes from, it among them. `members`: numbers of the islands of the last round.
    `claimed`: run and version of the checkpoint that it began from. `unproven`: nothing was exchanged since it began.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    terms: Mapping[str, Any] | None = None
    version: int = 0
    lineage: list[int] = field(default_factory=list)
    next_round: int = 1
    next_number: int = 0
    members: list[int] = field(default_factory=list)
    claimed: list[Any] | None = None
    unproven: bool = True

    def begin(self, version: int, claimed: list[Any] | None) -> None:
        """From now on all comes from the anchor of `version`."""
        self.version, self.lineage, self.claimed, self.unproven = version, [version], claimed, claimed is None
        self.next_round = max(self.next_round, version + 1)

    def commit(self, round_: Round) -> None:
        self.version, self.unproven = round_.id, False
        # What came after the base has died with those who had it.
        self.lineage = [*(one for one in self.lineage if one <= round_.base), round_.id][-KEPT:]
        self.members = [one.number for one in round_.partners]


@dataclass
class Island:
    """One that lives. `arrived`: samples with which it waits for a round. `waits`: the kind of the message by which it
    waits for an anchor; "": it does not. `claim`: run and version of the anchor that it has loaded. `late`: it has let
    the others wait, and not been heard of since. `told`: why it waits for an anchor."""

    number: int
    store: str
    addresses: list[str]
    process: str
    heard: float
    version: int = 0
    arrived: int | None = None
    waits: str = ""
    claim: list[Any] | None = None
    late: bool = False
    told: str = ""

    @classmethod
    def of(cls, message: Message, now: float) -> "Island":
        """Who says `join`; its number is -1 where it has none. ValueError, KeyError or TypeError where a part of the
        message is missing or is none."""
        number, terms = message.get("number"), {**message["terms"]}
        if not (float(terms.get("timeout", 1.0)) > 0 and int(terms.get("minimum", 1)) > 0):
            raise ValueError(f"no terms: {terms}")
        return cls(
            -1 if number is None else int(number),
            str(message["store"]),
            [str(address) for address in message["addresses"]],
            str(message.get("process", "")),
            now,
            int(message.get("version", 0)),
        )


@dataclass
class Running:
    """A round whose exchange goes on. `votes`: by the name of an island, None until it has voted."""

    round: Round
    votes: dict[str, bool | None]
