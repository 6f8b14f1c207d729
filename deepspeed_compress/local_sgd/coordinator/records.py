"""Records of a coordinator: its islands, and the state that must outlive it."""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.local_sgd.coordinator.messages import Claim, Join, Round

KEPT = 1000
"""Number of versions that are remembered: an island that returns after more exchanges is treated as a new one."""
PATIENCE = 30.0
"""Patience with an absent island that has not specified how long it waits, in units of `timeout`."""


@dataclass(frozen=True)
class Holder:
    """Island that has an anchor of the run and has not left, connected or not.

    `patience` is the seconds of absence after which the others may continue from an older anchor.
    """

    version: int
    host: str = ""
    patience: float = 0.0


@dataclass
class Saved:
    """State that must outlive the coordinator.

    Attributes:
        run: unique name of the run.
        terms: settings that all islands must share.
        version: version of the newest anchor.
        lineage: versions from which the newest anchor derives, including its own.
        next_round: id of the next round.
        next_number: number of the next island.
        members: numbers of the islands in the last committed round.
        claimed: run and version of the checkpoint from which the run began; None if it began with new weights.
        unproven: True until something is exchanged after the run began with new weights.
        holders: the islands that have an anchor of the lineage and have not left, by number.
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
    holders: dict[int, Holder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        found: Mapping[Any, Any] = self.holders
        # JSON keys are strings.
        self.holders = {int(number): one if isinstance(one, Holder) else Holder(**one) for number, one in found.items()}

    def begin(self, version: int, claimed: list[Any] | None, members: Iterable[int] = ()) -> None:
        """Begin again with the anchor of `version`, on which `members` have agreed. Anchors of others become void."""
        self.version, self.lineage, self.claimed, self.unproven = version, [version], claimed, claimed is None
        self.next_round = max(self.next_round, version + 1)
        self.members, self.holders = list(members), {}

    def commit(self, round_: Round) -> None:
        """Make the anchor that `round_` results in the newest. Versions after its base are dropped."""
        self.version, self.unproven = round_.id, False
        self.lineage = [*(one for one in self.lineage if one <= round_.base), round_.id][-KEPT:]
        self.members = [partner.number for partner in round_.partners]
        self.holders = {number: holder for number, holder in self.holders.items() if holder.version in self.lineage}


@dataclass
class Island:
    """Connected island.

    Attributes:
        number: unique number of the island.
        join: the message with which it joined.
        version: version of its anchor; 0 for none.
        arrived: number of samples with which it waits for a round; None if it does not wait for one.
        waits: kind of the message by which it waits for an anchor; "" if it does not wait for one.
        waiting_since: time since which it waits for an anchor.
        claim: its report of the anchor that it has loaded, until it is answered.
        late: True if it made the others wait and has not arrived since.
        last_reason: last reason for waiting that it was given.
    """

    number: int
    join: Join
    version: int = 0
    arrived: int | None = None
    waits: str = ""
    waiting_since: float = 0.0
    claim: Claim | None = None
    late: bool = False
    last_reason: str = ""

    @property
    def patience(self) -> float:
        """Return the seconds of absence after which the others may continue from an older anchor."""
        timeout, give_up = float(self.join.terms.get("timeout", 1.0)), self.join.give_up
        # Half: the islands that wait for it then outlast it, although they wait no longer than it would.
        return PATIENCE * timeout if give_up is None else max(timeout, give_up / 2)

    @property
    def host(self) -> str:
        """Return the host of the island's first rank."""
        return self.join.store.rpartition(":")[0]

    @property
    def title(self) -> str:
        """Return the number and the host, for log lines."""
        return f"island {self.number} ({self.host})"

    def wait(self, kind: str, now: float) -> None:
        """Wait for an anchor, by a message of `kind`."""
        if not self.waits:
            self.waiting_since, self.last_reason = now, ""
        self.waits = kind
