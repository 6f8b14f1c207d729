"""Rounds of exchange as a coordinator sees them: opening, participants, votes, and commitment."""

from collections.abc import Mapping

from deepspeed_compress.local_sgd.coordinator.membership import Membership, absent_holders, too_few
from deepspeed_compress.local_sgd.coordinator.messages import Arrive, Outcome, Partner, Round, Vote, as_message
from deepspeed_compress.local_sgd.coordinator.records import Island, RunningRound


class Rounds:
    """Rounds among the islands of `membership`. At most one round is running at a time."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.running: RunningRound | None = None
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
            self._open(name, now)

    def vote(self, name: str, vote: Vote, now: float) -> None:
        """Record the vote of the island `name`, or repeat the outcome of a round that has ended."""
        running = self.running
        if running is None or running.round.id != vote.round or name not in running.votes:
            self._send_outcome(name, Outcome(id=vote.round, committed=vote.round in self._membership.saved.lineage))
        else:
            running.votes[name] = vote.ok

    def abandon(self, name: str) -> None:
        """Handle the loss of the island `name`: a round in which it has not voted is void."""
        running = self.running
        if running is not None and running.votes.get(name, True) is None:
            self._end(running, committed=False)

    def decide(self) -> None:
        """End the running round if one island has failed, or all have voted."""
        running = self.running
        if running is None:
            return
        if any(vote is False for vote in running.votes.values()):
            self._end(running, committed=False)
        elif all(running.votes.values()):
            self._end(running, committed=True)

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

    def _open(self, name: str, now: float) -> None:
        if self._deadline is None:
            self._deadline = now + self._membership.timeout
            for other, one in self._membership.connected.items():
                if other != name and one.version:
                    self._membership.send(other, {"kind": "open"})

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
            Partner(number=one.number, samples=one.arrived or 0, version=one.version, store=one.store)
            for one in sorted(arrived.values(), key=lambda one: one.number)
        ]
        id_ = saved.next_round
        saved.next_round += 1
        round_ = Round(id=id_, base=newest, fresh=f"{saved.run}/{id_}", partners=partners)
        self.running = RunningRound(round_, dict.fromkeys(arrived))
        for name, one in arrived.items():
            one.arrived = None
            self._membership.send(name, as_message("round", round_))

    def _end(self, running: RunningRound, committed: bool) -> None:
        membership = self._membership
        membership.log(f"round {running.round.id} is {'committed' if committed else 'void'}")
        self.running = None
        if committed:
            membership.saved.commit(running.round)
            membership.known.commit(membership.numbers())
        for name in running.votes:
            one = membership.connected.get(name)
            if one is not None and committed and one.version == running.round.base:
                membership.set_version(one, running.round.id)
            self._send_outcome(name, Outcome(id=running.round.id, committed=committed))

    def _send_outcome(self, name: str, outcome: Outcome) -> None:
        self._membership.send(name, as_message("outcome", outcome))
