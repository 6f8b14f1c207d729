"""The coordinator of islands as a pure state machine: no sockets, no clock of its own.

There is one coordinator, and it alone decides who takes part in a round and whether the round counts. So no two groups
of islands can both go on: who cannot reach it does not exchange. An outcome is saved before anybody hears of it, and
every other round is void for ever, so whoever comes back later is told what the others were told. A round is void also
when what came of it was lost with all who had it, and the others have gone on from before.

A coordinator that was started again does not know who died meanwhile. It closes no round before more than half of the
islands of the last one have come back, or have left: another coordinator, started from a copy of the file elsewhere,
would otherwise go on with those that reach it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from deepspeed_compress.services.rendezvous.records import Island, Running, Saved
from deepspeed_compress.services.rendezvous.wire import Message, Outcome, Partner, Round

__all__ = ["Coordinator", "Saved"]

TRIES = 2
"""Void rounds in a row, after which one island after the other is left out of one: a link between two may be broken."""


class Coordinator:
    """Tell it what is heard (`hear`, `lost`) and the time (`tick`), in seconds of any clock; then send what `take`
    gives, after saving `saved` if it has changed. `came_back`: `saved` is that of a former one."""

    def __init__(self, saved: Saved, came_back: bool = False) -> None:
        self.saved = saved
        self._islands: dict[str, Island] = {}
        self._running: Running | None = None
        self._deadline: float | None = None
        self._missing = set(saved.members) if came_back else set()
        self._void = self._turn = 0
        self._outbox: list[tuple[str, Message]] = []
        self._heard: Mapping[str, Callable[[str, Message, float], None]] = {
            "join": self._join,
            "beat": lambda name, message, now: None,
            "ready": self._ready,
            "claim": self._claim,
            "arrive": self._arrive,
            "vote": self._vote,
            "sources": self._sources,
            "leave": self._leave,
        }

    @property
    def timeout(self) -> float:
        """Seconds; of no meaning before the first island has joined."""
        return float((self.saved.terms or {}).get("timeout", 1.0))

    @property
    def minimum(self) -> int:
        return int((self.saved.terms or {}).get("minimum", 1))

    def to_save(self) -> str:
        """`saved` as JSON."""
        return json.dumps(asdict(self.saved))

    def take(self) -> list[tuple[str, Message]]:
        """What is to be said to whom, in order."""
        found, self._outbox = self._outbox, []
        return found

    def hear(self, name: str, message: Message, now: float) -> None:
        """`message` of the island `name`, which is a new one for every process. ValueError where it is none."""
        handler = self._heard.get(message["kind"])
        if handler is None:
            raise ValueError(f"unknown message {message['kind']!r}")
        if name in self._islands:
            self._islands[name].heard = now
        elif message["kind"] != "join":
            # Declared dead meanwhile: it has to join again.
            self._say(name, {"kind": "unknown"})
            return
        handler(name, message, now)
        self._settle(now)

    def lost(self, name: str, now: float) -> None:
        """The connection to `name` has ended: it is dead until it joins again."""
        if self._islands.pop(name, None) is not None:
            self._abandon(name)
            self._settle(now)

    def tick(self, now: float) -> None:
        """Whoever was silent for longer than `timeout` is dead."""
        silent = [name for name, one in self._islands.items() if one.heard < now - self.timeout]
        for name in silent:
            self._say(name, {"kind": "unknown"})
            self.lost(name, now)
        self._settle(now)

    def status(self, now: float) -> dict[str, Any]:
        """Return for people the run, its newest version, and the islands that are there."""
        there = [
            {
                "number": one.number,
                "host": one.store.rpartition(":")[0],
                "version": one.version,
                "waiting": one.arrived is not None,
                "silent": round(now - one.heard, 1),
            }
            for one in sorted(self._islands.values(), key=lambda one: one.number)
        ]
        running = None if self._running is None else self._running.round.id
        return {"run": self.saved.run, "version": self.saved.version, "round": running, "islands": there}

    # What islands say.

    def _join(self, name: str, message: Message, now: float) -> None:
        one, known = Island.of(message, now), self._islands.get(name)
        problem = self._problem(name, message)
        if problem:
            self._say(name, {"kind": "refused", "why": problem})
            return
        if not self._islands:
            self.saved.terms = message["terms"]
        if known is not None:
            one.number, one.arrived = known.number, known.arrived
        elif message.get("number") is None:
            one.number, self.saved.next_number = self.saved.next_number, self.saved.next_number + 1
        self._islands[name] = one
        self._missing.discard(one.number)
        self._say(name, {"kind": "welcome", "run": self.saved.run, "number": one.number})

    def _problem(self, name: str, message: Message) -> str | None:
        run, terms = message.get("run"), self.saved.terms if self._islands else None
        if run is not None and run != self.saved.run:
            return f"the coordinator is of run {self.saved.run}, and the island of run {run}"
        process = message.get("process")
        if process and any(one.process == process for other, one in self._islands.items() if other != name):
            return f"process {process} is an island already, by another engine, and would wait for itself"
        texts = [
            f"{key} is {value!r}, that of the others {terms.get(key)!r}"
            for key, value in message["terms"].items()
            if terms is not None and terms.get(key) != value
        ]
        return "; ".join(texts) or None

    def _ready(self, name: str, message: Message, now: float) -> None:
        self._islands[name].version = int(message["version"])

    def _sources(self, name: str, message: Message, now: float) -> None:
        self._islands[name].waits = "sources"

    def _claim(self, name: str, message: Message, now: float) -> None:
        one = self._islands[name]
        one.claim, one.waits, one.version = [message["run"], int(message["version"])], "claim", 0
        if message["run"] == self.saved.run:
            self._missing.discard(message.get("number"))

    def _arrive(self, name: str, message: Message, now: float) -> None:
        one = self._islands[name]
        one.version, one.late = int(message["version"]), False
        if one.version not in self.saved.lineage:
            # Of another beginning: what it has moved has no meaning here.
            one.version, one.waits = 0, "arrive"
        elif self._running is not None or (self._deadline is None and one.version != self._newest()):
            # Too late for one round, and no reason to begin another.
            self._say(name, {"kind": "over"})
        else:
            one.arrived = int(message["samples"])
            self._open(name, now)

    def _vote(self, name: str, message: Message, now: float) -> None:
        running, id_ = self._running, int(message["round"])
        if running is None or running.round.id != id_ or name not in running.votes:
            self._say_outcome(name, Outcome(id_, id_ in self.saved.lineage))
        else:
            running.votes[name] = bool(message["ok"])

    def _leave(self, name: str, message: Message, now: float) -> None:
        number = self._islands[name].number
        self.saved.members = [one for one in self.saved.members if one != number]
        self._missing.discard(number)
        self.lost(name, now)

    # What follows.

    def _settle(self, now: float) -> None:
        self._decide()
        if self._quorate():
            self._settle_claims()
            self._settle_waiting()
        self._close(now)

    def _quorate(self) -> bool:
        """Whether enough of those that took part last have come back to a coordinator that was started again."""
        return 2 * len(self._missing) < max(1, len(self.saved.members))

    def _newest(self) -> int:
        """The newest version that anybody has; 0: none."""
        there = {one.version for one in self._islands.values()}
        return next((version for version in reversed(self.saved.lineage) if version in there), 0)

    def _settle_claims(self) -> None:
        """Where all begin anew, the newest of the checkpoints is what they begin with."""
        claims = [one.claim for one in self._islands.values() if one.waits and one.claim is not None]
        if self.saved.unproven and len(claims) >= self.minimum:
            self.saved.begin(max(claims, key=lambda one: one[1])[1], max(claims, key=lambda one: one[1]))
            for one in self._islands.values():
                one.version = 0
        for one in self._islands.values():
            if one.claim == self.saved.claimed and one.claim is not None and one.claim[1] == self.saved.version:
                one.version = self.saved.version

    def _settle_waiting(self) -> None:
        claiming = self.saved.unproven and any(one.claim for one in self._islands.values() if one.waits)
        waiting = {name: one for name, one in self._islands.items() if one.waits}
        newest = self._newest()
        if waiting and not newest and not claiming and len(self._islands) >= self.minimum:
            newest = self._found(waiting)
        if claiming and not newest:
            self._let_load(waiting)
        if waiting and not newest:
            self._explain(waiting)
        for name, one in waiting.items() if newest else ():
            if not (claiming and one.claim):
                sources = [other.addresses for other in self._islands.values() if other.version == newest]
                one.waits, one.claim = "", None
                # Who has it already needs nobody.
                self._say(
                    name,
                    {"kind": "anchor", "version": newest, "sources": [] if one.version == newest else sources},
                )

    def _let_load(self, waiting: Mapping[str, Island]) -> None:
        """Others have loaded checkpoints, and nobody has an anchor: who begins would wait for them, and they for its
        checkpoint. It goes on with its own weights until it has loaded that, or wants to exchange."""
        for name, one in waiting.items():
            if one.waits == "sources":
                one.waits = ""
                self._say(name, {"kind": "anchor", "version": 0, "sources": []})

    def _explain(self, waiting: Mapping[str, Island]) -> None:
        """To those who do wait."""
        claims = sum(one.claim is not None for one in waiting.values())
        there = f"{claims} have loaded a checkpoint" if claims else f"{len(self._islands)} are there"
        why = f"of at least {self.minimum} islands {there}"
        for name, one in waiting.items():
            if one.waits and one.told != why:
                one.told = why
                self._say(name, {"kind": "waiting", "why": why})

    def _found(self, waiting: Mapping[str, Island]) -> int:
        """Nobody has an anchor: the island with the lowest number begins with its own weights."""
        self.saved.begin(self.saved.next_round, None)
        founder = min(waiting.values(), key=lambda one: one.number)
        founder.version = self.saved.version
        return self.saved.version

    def _open(self, name: str, now: float) -> None:
        if self._deadline is None:
            self._deadline = now + self.timeout
            for other, one in self._islands.items():
                if other != name and one.version:
                    self._say(other, {"kind": "open"})

    def _close(self, now: float) -> None:
        """Begin the exchange when all are here, or have been waited for long enough."""
        arrived = {name: one for name, one in self._islands.items() if one.arrived is not None}
        if self._deadline is None or not arrived:
            self._deadline = None
            return
        others = [one for name, one in self._islands.items() if one.version and not one.late and name not in arrived]
        if others and now < self._deadline:
            return
        for one in others:
            # Who evaluates, or saves, is waited for once.
            one.late = True
        why = self._hindrance(arrived)
        if why is None:
            self._deadline = None
            self._begin(dict(self._chosen(arrived)))
        elif now >= self._deadline:
            self._deadline = now + self.timeout
            for name in arrived:
                self._say(name, {"kind": "waiting", "why": why})

    def _hindrance(self, arrived: Mapping[str, Island]) -> str | None:
        if not self._quorate():
            there = len(self.saved.members) - len(self._missing)
            return (
                f"of the {len(self.saved.members)} islands of the last exchange {there} have come back to the "
                "coordinator since it was started again"
            )
        if len(arrived) < self.minimum:
            return f"of at least {self.minimum} islands {len(arrived)} are there"
        return None

    def _chosen(self, arrived: Mapping[str, Island]) -> Iterator[tuple[str, Island]]:
        """Those who take part; the others go on. After rounds in vain one is left out, each in turn, as long as most of
        the others are there."""
        names, left_out = sorted(arrived, key=lambda name: arrived[name].number), None
        if self._void >= TRIES and len(names) > max(2, self.minimum):
            left_out = names[self._turn % len(names)]
            self._turn += 1
        for name in names:
            if name == left_out:
                arrived[name].arrived = None
                self._say(name, {"kind": "over"})
            else:
                yield name, arrived[name]

    def _begin(self, chosen: Mapping[str, Island]) -> None:
        newest = self._newest()
        if all(one.version != newest for one in chosen.values()):
            # What they find together nobody could add to the newest anchor.
            for name, one in chosen.items():
                one.arrived = None
                self._say(name, {"kind": "over"})
            return
        partners = [Partner(one.number, one.arrived or 0, one.version, one.store) for one in chosen.values()]
        id_ = self.saved.next_round
        self.saved.next_round += 1
        self._running = Running(Round(id_, newest, f"{self.saved.run}/{id_}", tuple(partners)), dict.fromkeys(chosen))
        for name, one in chosen.items():
            one.arrived = None
            self._say(name, self._running.round.message())

    def _abandon(self, name: str) -> None:
        """`name` is gone: a round that it has not voted in is void."""
        running = self._running
        if running is not None and running.votes.get(name, True) is None:
            self._end(running, committed=False)

    def _decide(self) -> None:
        running = self._running
        if running is None:
            return
        if any(vote is False for vote in running.votes.values()):
            self._void += 1
            self._end(running, committed=False)
        elif all(running.votes.values()):
            self._void = 0
            self._end(running, committed=True)

    def _end(self, running: Running, committed: bool) -> None:
        self._running = None
        if committed:
            self.saved.commit(running.round)
            self._missing.clear()
        for name in running.votes:
            one = self._islands.get(name)
            if one is not None and committed and one.version == running.round.base:
                one.version = running.round.id
            self._say_outcome(name, Outcome(running.round.id, committed))

    def _say(self, name: str, message: Message) -> None:
        self._outbox.append((name, message))

    def _say_outcome(self, name: str, outcome: Outcome) -> None:
        self._say(name, {"kind": "outcome", **asdict(outcome)})
