"""Coordinator of islands as a pure state machine, without sockets or a clock.

There is one coordinator, and it alone decides which islands take part in a round and whether the round is committed. So
two groups of islands cannot both continue: an island that cannot reach the coordinator does not exchange. An outcome is
saved before any island is told, and every other round is void for good, so an island that returns later is told the
same as the others. A round is also void if its result was lost with all islands that had it, and the others have
continued from an older anchor.

**Membership.** Decisions are made from the islands that are known and have not left, not from those that happen to be
connected (`known`). An island is known from when it has an anchor of the run until it sends `leave`, another process
loads its checkpoint, or a user declares it gone (`forget`).

1. The run continues from the newest anchor that a known island has. If none of its holders is connected, the others
train without exchanging. Once these holders have been absent for longer than their patience (half of their `give_up`),
the run continues from the newest anchor that is connected.
2. After the first exchange no island begins again with its own weights, however long the holders are absent, and terms
stay as they are. A newcomer is told to train with its own weights, which have no effect on the run, so that it can load
a checkpoint; when it requests an exchange it waits, and is told which islands are missing.
3. If no connected island has an anchor, the run continues from the newest checkpoint that was loaded, once `minimum`
islands have loaded one and more than half of the islands of the last round are back, have left, or were absent for
longer than their patience. A checkpoint of another run does not replace anchors that known islands hold.
4. Before the first exchange an absent island whose patience is over is forgotten. Then the run may begin again.

A restarted coordinator does not know which islands died in the meantime. It closes no round before more than half of
the islands of the last one have returned, or have left: another coordinator, started elsewhere from a copy of the file,
would otherwise continue with the islands that reach it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from deepspeed_compress.local_sgd.coordinator import requests
from deepspeed_compress.local_sgd.coordinator.known_islands import KnownIslands
from deepspeed_compress.local_sgd.coordinator.reasons import (
    few,
    lacking,
    more_to_load,
    names_of,
    not_back,
    older_file,
    voting,
)
from deepspeed_compress.local_sgd.coordinator.records import Holder, Island, Running, Saved
from deepspeed_compress.local_sgd.coordinator.requests import Request, read_request
from deepspeed_compress.local_sgd.coordinator.wire import Message, Outcome, Partner, Round

__all__ = ["Coordinator", "Saved"]

TRIES = 2
"""Void rounds in a row after which islands are left out in turn: a link between two may be broken."""


class Coordinator:
    """Decisions on membership, rounds, and their commitment.

    Pass it messages (`hear`), lost connections (`lost`) and the time (`tick`), in seconds of any clock; then send the
    messages that `take` returns, after saving `saved` if it has changed.

    Args:
        saved: the state.
        came_back: True if `saved` is from an earlier process.
    """

    def __init__(self, saved: Saved, came_back: bool = False) -> None:
        self.saved = saved
        self._known = KnownIslands(saved, came_back)
        self._islands: dict[str, Island] = {}
        self._running: Running | None = None
        self._deadline: float | None = None
        self._void = self._turn = 0
        self._outbox: list[tuple[str, Message]] = []
        self._heard: Mapping[type[Request], Callable[[str, Any, float], None]] = {
            requests.Join: self._join,
            requests.Beat: lambda name, request, now: None,
            requests.Ready: self._ready,
            requests.Claim: self._claim,
            requests.Arrive: self._arrive,
            requests.Vote: self._vote,
            requests.Sources: self._sources,
            requests.Leave: self._leave,
            requests.Forget: self._forget,
        }

    @property
    def timeout(self) -> float:
        """Return the seconds of silence after which an island is lost.

        The value has no meaning before the first island has joined.
        """
        return float((self.saved.terms or {}).get("timeout", 1.0))

    @property
    def minimum(self) -> int:
        """Return the number of islands without which nothing begins and nothing is exchanged."""
        return int((self.saved.terms or {}).get("minimum", 1))

    def to_save(self) -> str:
        """Return `saved` as JSON."""
        return json.dumps(asdict(self.saved))

    def take(self) -> list[tuple[str, Message]]:
        """Return the messages to send, in order, each with the name of its island."""
        found, self._outbox = self._outbox, []
        return found

    def hear(self, name: str, message: Message, now: float) -> None:
        """Handle `message` of the island `name`, which is a new name for every process.

        Raises:
            ValueError: if it is not a valid message, or cannot be true. Nothing has changed then.
        """
        request = read_request(message)
        self._check_versions(request)
        if name in self._islands:
            self._islands[name].heard = now
        elif not isinstance(request, requests.Join | requests.Forget):
            # It was lost in the meantime, and has to join again.
            self._say(name, {"kind": "unknown"})
            return
        self._heard[type(request)](name, request, now)
        self._settle(now)

    def _check_versions(self, request: Any) -> None:
        """Raise ValueError for a version that no round had, in a message that only an island of this run sends."""
        version = request.round if isinstance(request, requests.Vote) else getattr(request, "version", 0)
        told = isinstance(request, requests.Claim) or getattr(request, "run", None) is not None
        if not told and version >= self.saved.next_round:
            raise ValueError(f"version {version} is of no round (allowed: up to {self.saved.next_round - 1})")

    def lost(self, name: str, now: float) -> None:
        """Handle the end of the connection to `name`."""
        one = self._islands.pop(name, None)
        if one is not None:
            self._known.lose(one.number, now)
            self._abandon(name)
            self._settle(now)

    def tick(self, now: float) -> None:
        """Handle the time. Islands that were silent for longer than `timeout` are lost."""
        silent = [name for name, one in self._islands.items() if one.heard < now - self.timeout]
        for name in silent:
            self._say(name, {"kind": "unknown"})
            self.lost(name, now)
        self._settle(now)
        self._tell_for_whom_a_round_waits(now)

    def status(self, now: float) -> dict[str, Any]:
        """Return a summary for users: the run, its newest version, and the islands that are connected or missing."""
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
        absent = self._known.absent(self._numbers(), since=0)
        missing = {**dict.fromkeys(self._known.missing, Holder(0)), **absent}
        running = None if self._running is None else self._running.round.id
        return {
            "run": self.saved.run,
            "version": self.saved.version,
            "round": running,
            "islands": there,
            "missing": [
                {"number": number, "host": one.host, "version": one.version} for number, one in sorted(missing.items())
            ],
        }

    # Messages of islands.

    def _join(self, name: str, join: requests.Join, now: float) -> None:
        problem = self._problem(name, join)
        if problem:
            self._say(name, {"kind": "refused", "why": problem})
            return
        if not self._is_bound():
            self.saved.terms = join.terms
        known, number = self._islands.get(name), join.number
        if known is not None:
            number = known.number
        elif number is None:
            number, self.saved.next_number = self.saved.next_number, self.saved.next_number + 1
        self._islands[name] = one = Island.of(join, number, now)
        one.arrived = None if known is None else known.arrived
        self._have(one, join.version)
        self._say(name, {"kind": "welcome", "run": self.saved.run, "number": number})

    def _is_bound(self) -> bool:
        """Return True if terms have to stay as they are, because an island that has not left has agreed to them."""
        return self.saved.terms is not None and bool(self._islands or self.saved.holders)

    def _problem(self, name: str, join: requests.Join) -> str | None:
        """Return why the island may not join; None if it may."""
        saved, others = self.saved, {other: one for other, one in self._islands.items() if other != name}
        if join.run is not None and join.run != saved.run:
            return f"the coordinator is of run {saved.run}, and the island of run {join.run}"
        if (join.number or 0) >= max(1, saved.next_number) or join.version >= saved.next_round:
            return older_file(join, saved)
        if any(one.number == join.number for one in others.values()):
            return f"island {join.number} is connected already, by another process"
        if join.process and any(one.process == join.process for one in others.values()):
            return f"process {join.process} is an island already, by another engine, and would wait for itself"
        return self._other_terms(join)

    def _other_terms(self, join: requests.Join) -> str | None:
        terms = (self.saved.terms or {}) if self._is_bound() else join.terms
        texts = [
            f"{key} is {join.terms.get(key)!r}, that of the others {terms.get(key)!r}"
            for key in {**join.terms, **terms}
            if terms.get(key) != join.terms.get(key)
        ]
        if texts and not self._islands:
            texts.append(lacking(self._known.absent((), since=0)))
        return "; ".join(texts) or None

    def _ready(self, name: str, ready: requests.Ready, now: float) -> None:
        self._have(self._islands[name], ready.version)

    def _have(self, one: Island, version: int) -> None:
        """Record that the connected island `one` has the anchor of `version` from now on; 0 for none."""
        one.version = version
        self._known.hold(one)

    def _sources(self, name: str, sources: requests.Sources, now: float) -> None:
        self._islands[name].wait("sources", now)

    def _claim(self, name: str, claim: requests.Claim, now: float) -> None:
        one = self._islands[name]
        one.wait("claim", now)
        one.claim = [claim.run, claim.version]
        self._have(one, 0)
        if claim.run == self.saved.run and claim.number not in self._numbers():
            self._known.replace(claim.number)

    def _arrive(self, name: str, arrive: requests.Arrive, now: float) -> None:
        one = self._islands[name]
        one.late = False
        self._have(one, arrive.version)
        if one.version not in self.saved.lineage:
            # It belongs to another beginning, so its weight changes have no meaning here.
            self._have(one, 0)
            one.wait("arrive", now)
        elif self._running is not None or (self._deadline is None and one.version != self._newest()):
            # It is too late for one round, and does not start another.
            self._say(name, {"kind": "over"})
        else:
            one.arrived = arrive.samples
            self._open(name, now)

    def _vote(self, name: str, vote: requests.Vote, now: float) -> None:
        running = self._running
        if running is None or running.round.id != vote.round or name not in running.votes:
            self._say_outcome(name, Outcome(vote.round, vote.round in self.saved.lineage))
        else:
            running.votes[name] = vote.ok

    def _leave(self, name: str, leave: requests.Leave, now: float) -> None:
        self._known.give_up([self._islands[name].number])
        self.lost(name, now)

    def _forget(self, name: str, forget: requests.Forget, now: float) -> None:
        """Give up the named islands, except connected ones."""
        self._known.give_up({*forget.numbers} - self._numbers())

    # Decisions.

    def _settle(self, now: float) -> None:
        self._known.expire(now)
        self._decide()
        self._settle_claims()
        self._settle_waiting(now)
        self._close(now)

    def _numbers(self) -> set[int]:
        """Return the numbers of the islands that are connected."""
        return {one.number for one in self._islands.values()}

    def _newest_there(self) -> int:
        """Return the newest version of the lineage that a connected island has; 0 for none."""
        lineage = {*self.saved.lineage}
        return max((one.version for one in self._islands.values() if one.version in lineage), default=0)

    def _newest(self) -> int:
        """Return the version from which the run continues: the newest one of awaited islands; 0 for none."""
        return max((self._newest_there(), *self._known.awaited()))

    def _absent(self) -> Mapping[int, Holder]:
        """Return the islands without which the run does not continue from what is connected."""
        absent = self._known.absent(self._numbers(), since=self._newest_there())
        return {**{number: Holder(0) for number in self._known.missing}, **absent}

    def _settle_claims(self) -> None:
        """Accept loaded checkpoints as anchors, if no island has a newer one."""
        claiming = [one for one in self._islands.values() if one.waits and one.claim is not None]
        if self._may_begin(claiming):
            newest = max((one.claim for one in claiming if one.claim), key=lambda claim: int(claim[1]))
            self.saved.begin(newest[1], newest, [one.number for one in claiming])
            for one in self._islands.values():
                self._have(one, 0)
        for one in sorted(claiming, key=lambda one: one.claim[1] if one.claim else 0):
            if one.claim is not None and self._is_anchor(one.claim):
                self._have(one, one.claim[1])

    def _may_begin(self, claiming: list[Island]) -> bool:
        """Return True if the run begins again from a checkpoint."""
        if len(claiming) < self.minimum or not self._known.has_majority(patient=not self.saved.unproven):
            return False
        own = all(one.claim is not None and one.claim[0] == self.saved.run for one in claiming)
        free = own or not self._known.absent(self._numbers(), since=0)
        return self.saved.unproven or (free and not self._newest_there())

    def _is_anchor(self, claim: list[Any]) -> bool:
        """Return True if `claim` is an anchor of this run, and no island has a newer one."""
        begun = claim == self.saved.claimed and claim[1] == self.saved.version
        own = claim[0] == self.saved.run and claim[1] in self.saved.lineage
        return begun or (own and self._newest_there() > 0 and claim[1] >= self._newest())

    def _settle_waiting(self, now: float) -> None:
        """Answer the islands that wait for an anchor, or tell them why they wait."""
        waiting = {name: one for name, one in self._islands.items() if one.waits}
        claims = sum(one.claim is not None for one in waiting.values())
        if waiting and not (claims and self.saved.unproven) and self._may_found():
            self._found(waiting)
        newest = self._newest()
        sources = [one.addresses for one in self._islands.values() if newest and one.version == newest]
        for name, one in waiting.items():
            if sources and not (self.saved.unproven and one.claim):
                # An island that has it already needs no source.
                self._give(name, newest, [] if one.version == newest else sources)
            elif one.waits == "sources" and not sources and (claims or self._has_waited(one, now)):
                # It continues with its own weights until it has loaded a checkpoint, or requests an exchange.
                self._give(name, 0, [])
            else:
                self._explain(name, claims)

    def _has_waited(self, one: Island, now: float) -> bool:
        """Return True if `one` has waited without success for islands that have not left.

        It may have to load a checkpoint.
        """
        return bool(self._absent()) and now - one.asked >= self.timeout

    def _give(self, name: str, version: int, sources: list[list[str]]) -> None:
        self._islands[name].waits, self._islands[name].claim = "", None
        self._say(name, {"kind": "anchor", "version": version, "sources": sources})

    def _explain(self, name: str, claims: int) -> None:
        """Tell the island `name` why it waits for an anchor, unless it was told already."""
        one, absent = self._islands[name], self._absent()
        if claims and claims < self.minimum:
            why = more_to_load(self.minimum, claims, absent)
        else:
            why = lacking(absent) if absent else few(self.minimum, self._numbers())
        if one.told != why:
            one.told = why
            self._say(name, {"kind": "waiting", "why": why})

    def _may_found(self) -> bool:
        """Return True if the run may begin with an island's own weights: no island that has not left has others."""
        return not self.saved.holders and not self._known.missing and len(self._islands) >= self.minimum

    def _found(self, waiting: Mapping[str, Island]) -> None:
        """Begin with the weights of the island that has the lowest number."""
        self.saved.begin(self.saved.next_round, None)
        founder = min(waiting.values(), key=lambda one: one.number)
        self._have(founder, self.saved.version)

    def _open(self, name: str, now: float) -> None:
        if self._deadline is None:
            self._deadline = now + self.timeout
            for other, one in self._islands.items():
                if other != name and one.version:
                    self._say(other, {"kind": "open"})

    def _close(self, now: float) -> None:
        """Begin the exchange when all islands have arrived, or were awaited long enough."""
        arrived = {name: one for name, one in self._islands.items() if one.arrived is not None}
        if self._deadline is None or not arrived:
            self._deadline = None
            return
        others = [one for name, one in self._islands.items() if one.version and not one.late and name not in arrived]
        if others and now < self._deadline:
            return
        for one in others:
            # An island that evaluates or saves is awaited once.
            one.late = True
        why = self._hindrance(arrived)
        if why is None:
            self._deadline = None
            self._begin(dict(self._chosen(arrived)), now)
        elif now >= self._deadline:
            self._deadline = now + self.timeout
            for name in arrived:
                self._say(name, {"kind": "waiting", "why": why})

    def _hindrance(self, arrived: Mapping[str, Island]) -> str | None:
        """Return why the islands that have arrived cannot exchange yet; None if they can."""
        if not self._known.has_majority():
            return not_back(self._known.missing, len(self.saved.members))
        if len(arrived) < self.minimum:
            return few(self.minimum, {one.number for one in arrived.values()})
        return None

    def _chosen(self, arrived: Mapping[str, Island]) -> Iterator[tuple[str, Island]]:
        """Yield the islands that take part; the others continue without the round.

        After void rounds one island is left out, each in turn, as long as more than two remain.
        """
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

    def _begin(self, chosen: Mapping[str, Island], now: float) -> None:
        newest = self._newest()
        if all(one.version != newest for one in chosen.values()):
            # No island could apply their common result to the newest anchor.
            for name, one in chosen.items():
                one.arrived = None
                self._say(name, {"kind": "over"})
            return
        partners = [Partner(one.number, one.arrived or 0, one.version, one.store) for one in chosen.values()]
        id_ = self.saved.next_round
        self.saved.next_round += 1
        round_ = Round(id_, newest, f"{self.saved.run}/{id_}", tuple(partners))
        self._running = Running(round_, dict.fromkeys(chosen), now)
        for name, one in chosen.items():
            one.arrived = None
            self._say(name, round_.message())

    def _abandon(self, name: str) -> None:
        """Handle the loss of the island `name`: a round in which it has not voted is void."""
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
            self._known.commit(self._numbers())
        for name in running.votes:
            one = self._islands.get(name)
            if one is not None and committed and one.version == running.round.base:
                self._have(one, running.round.id)
            self._say_outcome(name, Outcome(running.round.id, committed))

    def _tell_for_whom_a_round_waits(self, now: float) -> None:
        """Tell the islands that have voted, every `timeout`, which ones have not."""
        running = self._running
        if running is None or now - running.told < self.timeout:
            return
        running.told = now
        late = {
            self._islands[name].number: self._islands[name].host for name, ok in running.votes.items() if ok is None
        }
        for name, ok in running.votes.items():
            if ok is not None:
                self._say(name, {"kind": "waiting", "why": voting(running.round.id, names_of(late))})

    def _say(self, name: str, message: Message) -> None:
        self._outbox.append((name, message))

    def _say_outcome(self, name: str, outcome: Outcome) -> None:
        self._say(name, {"kind": "outcome", **asdict(outcome)})
