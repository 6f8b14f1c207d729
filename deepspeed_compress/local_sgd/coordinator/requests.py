"""Requests of islands: for an anchor, by islands that join or have loaded a checkpoint, and for a round of exchange."""

from collections.abc import Collection, Mapping

from deepspeed_compress.local_sgd.coordinator.membership import Membership, absent_holders, too_few
from deepspeed_compress.local_sgd.coordinator.messages import Arrive, Claim, Partner, Round, Vote
from deepspeed_compress.local_sgd.coordinator.records import Holder, Island
from deepspeed_compress.transport.messages import Fields


class AnchorRequests:
    """Islands of `membership` that wait for an anchor."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def add(self, name: str, sources: Fields, now: float) -> None:
        """Handle the request of the island `name` for the islands that hold the newest anchor."""
        self._membership.connected[name].wait("sources", now)

    def claim(self, name: str, claim: Claim, now: float) -> None:
        """Handle the report of the island `name` that it has loaded an anchor from a checkpoint."""
        membership, island = self._membership, self._membership.connected[name]
        island.wait("claim", now)
        island.claim = claim
        membership.set_version(island, 0)
        if claim.run == membership.saved.run and claim.number not in membership.numbers():
            membership.known.replace(claim.number)

    def accept_claims(self) -> None:
        """Accept loaded checkpoints as anchors, if no island has a newer one."""
        membership = self._membership
        claims = {name: one.claim for name, one in membership.connected.items() if one.waits and one.claim is not None}
        if self._can_begin_again(claims.values()):
            membership.order({name: claim.number for name, claim in claims.items()})
            newest = max(claims.values(), key=lambda claim: claim.version)
            members = [membership.connected[name].number for name in claims]
            membership.saved.begin(newest.version, [newest.run, newest.version], members)
            for one in membership.connected.values():
                membership.set_version(one, 0)
        for name, claim in sorted(claims.items(), key=lambda one: one[1].version):
            if self._is_anchor(claim):
                membership.set_version(membership.connected[name], claim.version)

    def answer(self, now: float) -> None:
        """Answer the islands that wait for an anchor, or tell them why they wait."""
        membership, unproven = self._membership, self._membership.saved.unproven
        waiting = {name: one for name, one in membership.connected.items() if one.waits}
        claims = sum(one.claim is not None for one in waiting.values())
        if waiting and not (claims and unproven):
            self._begin_if_possible(waiting)
        newest = membership.newest()
        sources = [one.join.addresses for one in membership.connected.values() if newest and one.version == newest]
        absent = membership.required_absent() if waiting else {}
        for name, one in waiting.items():
            # It may have to load a checkpoint if it has waited without success for islands that have not left.
            has_waited = bool(absent) and now - one.waiting_since >= membership.timeout
            if sources and not (membership.saved.unproven and one.claim):
                # An island that has it already needs no source.
                self._give(name, newest, [] if one.version == newest else sources)
            elif one.waits == "sources" and not sources and (claims or has_waited):
                # It continues with its own weights until it has loaded a checkpoint, or requests an exchange.
                self._give(name, 0, [])
            else:
                self._explain(name, absent, claims)

    def _can_begin_again(self, claims: Collection[Claim]) -> bool:
        """Return True if the run begins again from a checkpoint."""
        membership, unproven = self._membership, self._membership.saved.unproven
        if len(claims) < membership.minimum or not membership.known.has_majority(patient=not unproven):
            return False
        own = all(claim.run == membership.saved.run for claim in claims)
        free = own or not membership.known.absent(membership.numbers(), since=0)
        return unproven or (free and not membership.newest_connected())

    def _is_anchor(self, claim: Claim) -> bool:
        """Return True if `claim` is an anchor of this run, and no island has a newer one."""
        membership, saved = self._membership, self._membership.saved
        is_beginning = [claim.run, claim.version] == saved.claimed and claim.version == saved.version
        is_own = claim.run == saved.run and claim.version in saved.lineage
        return is_beginning or (is_own and membership.newest_connected() > 0 and claim.version >= membership.newest())

    def _give(self, name: str, version: int, sources: list[list[str]]) -> None:
        island = self._membership.connected[name]
        island.waits, island.claim = "", None
        self._membership.send(name, {"kind": "anchor", "version": version, "sources": sources})

    def _explain(self, name: str, absent: Mapping[int, Holder], claims: int) -> None:
        """Tell the island `name` why it waits for an anchor, unless it was told already."""
        membership, island = self._membership, self._membership.connected[name]
        count = claims or len(membership.connected)
        why = absent_holders(absent) if absent else too_few(membership.minimum, count)
        if island.last_reason != why:
            island.last_reason = why
            membership.explain(name, why)

    def _begin_if_possible(self, waiting: Mapping[str, Island]) -> None:
        """Begin with the weights of the island that has the lowest number, if no island that has not left has any."""
        membership, saved = self._membership, self._membership.saved
        held = saved.holders or membership.known.missing
        if not held and len(membership.connected) >= membership.minimum:
            saved.begin(saved.next_round, None)
            founder = min(waiting.values(), key=lambda one: one.number)
            membership.set_version(founder, saved.version)


class Rounds:
    """Rounds among the islands of `membership`. At most one round is running at a time."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.running: Round | None = None
        self._votes: dict[str, bool | None] = {}
        """Votes on the running round by name; None for islands that have not voted yet."""
        self._deadline: float | None = None

    def arrive(self, name: str, request: Arrive, now: float) -> None:
        """Handle the request of the island `name` to exchange."""
        membership, island = self._membership, self._membership.connected[name]
        island.late = False
        membership.set_version(island, request.version)
        if island.version not in membership.saved.lineage:
            # It belongs to another beginning, so its weight changes have no meaning here.
            membership.set_version(island, 0)
            island.wait("arrive", now)
        elif self.running is not None or (self._deadline is None and island.version != membership.newest()):
            # It is too late for one round, and does not start another.
            membership.send(name, {"kind": "over"})
        else:
            island.arrived = request.samples
            if self._deadline is None:
                self._deadline = now + membership.timeout
                for other, one in membership.connected.items():
                    if other != name and one.version:
                        membership.send(other, {"kind": "open"})

    def vote(self, name: str, vote: Vote, now: float) -> None:
        """Record the vote of the island `name`, or repeat the outcome of a round that has ended."""
        if self.running is None or self.running.id != vote.round or name not in self._votes:
            self._send_outcome(name, vote.round, vote.round in self._membership.saved.lineage)
        else:
            self._votes[name] = vote.ok

    def abandon(self, name: str) -> None:
        """Handle the loss of the island `name`: a round in which it has not voted is void."""
        if self.running is not None and self._votes.get(name, True) is None:
            self._end(self.running, committed=False)

    def decide(self) -> None:
        """End the running round if one island has failed, or all have voted."""
        running, votes = self.running, self._votes.values()
        if running is not None and (False in votes or all(votes)):
            self._end(running, committed=False not in votes)

    def close(self, now: float) -> None:
        """Begin the exchange when all islands have arrived, or were awaited long enough."""
        connected = self._membership.connected
        arrived = {name: one for name, one in connected.items() if one.arrived is not None}
        if self._deadline is None or not arrived:
            self._deadline = None
            return
        others = [one for name, one in connected.items() if one.version and not one.late and name not in arrived]
        if others and now < self._deadline:
            return
        for one in others:
            # An island that evaluates or saves is awaited once.
            one.late = True
        obstacle = self._find_obstacle(arrived)
        if obstacle is None:
            self._deadline = None
            self._begin(arrived)
        elif now >= self._deadline:
            self._deadline = now + self._membership.timeout
            for name in arrived:
                self._membership.explain(name, obstacle)

    def _find_obstacle(self, arrived: Mapping[str, Island]) -> str | None:
        """Return why the islands that have arrived cannot exchange yet; None if they can."""
        known, minimum = self._membership.known, self._membership.minimum
        if not known.has_majority():
            return absent_holders(self._membership.required_absent())
        if len(arrived) < minimum:
            return too_few(minimum, len(arrived))
        return None

    def _begin(self, arrived: Mapping[str, Island]) -> None:
        saved, newest = self._membership.saved, self._membership.newest()
        if all(one.version != newest for one in arrived.values()):
            # No island could apply their common result to the newest anchor.
            for name, one in arrived.items():
                one.arrived = None
                self._membership.send(name, {"kind": "over"})
            return
        partners = [
            Partner(number=one.number, samples=one.arrived or 0, version=one.version, store=one.join.store)
            for one in sorted(arrived.values(), key=lambda one: one.number)
        ]
        id_ = saved.next_round
        saved.next_round += 1
        self.running = Round(id=id_, base=newest, fresh=f"{saved.run}/{id_}", partners=partners)
        self._votes = dict.fromkeys(arrived)
        for name, one in arrived.items():
            one.arrived = None
            self._membership.send(name, {"kind": "round", **self.running.model_dump()})

    def _end(self, round_: Round, committed: bool) -> None:
        membership = self._membership
        membership.log(f"round {round_.id} is {'committed' if committed else 'void'}")
        self.running = None
        if committed:
            membership.saved.commit(round_)
            membership.known.commit(membership.numbers())
        for name in self._votes:
            one = membership.connected.get(name)
            if one is not None and committed and one.version == round_.base:
                membership.set_version(one, round_.id)
            self._send_outcome(name, round_.id, committed)

    def _send_outcome(self, name: str, id_: int, committed: bool) -> None:
        self._membership.send(name, {"kind": "outcome", "id": id_, "committed": committed})
