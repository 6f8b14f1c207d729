"""Requests for anchors: islands that join, and islands that have loaded a checkpoint."""

from collections.abc import Collection, Mapping

from deepspeed_compress.local_sgd.coordinator.membership import Membership, absent_holders, too_few
from deepspeed_compress.local_sgd.coordinator.messages import Claim
from deepspeed_compress.local_sgd.coordinator.records import Island
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
        if waiting and not (claims and unproven) and self._can_begin():
            self._begin(waiting)
        newest = membership.newest()
        sources = [one.addresses for one in membership.connected.values() if newest and one.version == newest]
        for name, one in waiting.items():
            if sources and not (membership.saved.unproven and one.claim):
                # An island that has it already needs no source.
                self._give(name, newest, [] if one.version == newest else sources)
            elif one.waits == "sources" and not sources and (claims or self._has_waited(one, now)):
                # It continues with its own weights until it has loaded a checkpoint, or requests an exchange.
                self._give(name, 0, [])
            else:
                self._explain(name, claims)

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

    def _has_waited(self, one: Island, now: float) -> bool:
        """Return True if `one` has waited without success for islands that have not left.

        It may have to load a checkpoint.
        """
        return bool(self._membership.required_absent()) and now - one.waiting_since >= self._membership.timeout

    def _give(self, name: str, version: int, sources: list[list[str]]) -> None:
        island = self._membership.connected[name]
        island.waits, island.claim = "", None
        self._membership.send(name, {"kind": "anchor", "version": version, "sources": sources})

    def _explain(self, name: str, claims: int) -> None:
        """Tell the island `name` why it waits for an anchor, unless it was told already."""
        membership, absent = self._membership, self._membership.required_absent()
        island = membership.connected[name]
        count = claims or len(membership.connected)
        why = absent_holders(absent) if absent else too_few(membership.minimum, count)
        if island.last_reason != why:
            island.last_reason = why
            membership.explain(name, why)

    def _can_begin(self) -> bool:
        """Return True if the run may begin with an island's own weights: no island that has not left has others."""
        membership = self._membership
        held = membership.saved.holders or membership.known.missing
        return not held and len(membership.connected) >= membership.minimum

    def _begin(self, waiting: Mapping[str, Island]) -> None:
        """Begin with the weights of the island that has the lowest number."""
        saved = self._membership.saved
        saved.begin(saved.next_round, None)
        founder = min(waiting.values(), key=lambda one: one.number)
        self._membership.set_version(founder, saved.version)
