"""Membership of a run: which islands are connected or known, which anchors they hold, and the messages to send them.

A lost connection does not show whether an island has died, or is cut off with weights that no other island has. So the
anchor of an absent island stays valid until it leaves, a user removes it, or its patience is over: an island that is
cut off for longer ends itself.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from deepspeed_compress.local_sgd.coordinator.messages import Join
from deepspeed_compress.local_sgd.coordinator.records import Holder, Island, Saved
from deepspeed_compress.transport.machine_server import Message

_LONGEST = 1000
"""Maximum number of characters of names and values in a reason."""


class KnownIslands:
    """Holders of anchors in `saved`, and the time for which each has been absent.

    Args:
        saved: the state that outlives the coordinator.
        came_back: True if `saved` is from an earlier process.
    """

    def __init__(self, saved: Saved, came_back: bool) -> None:
        self._saved = saved
        self._absent_since: dict[int, float | None] = dict.fromkeys(saved.holders)
        """Time since which each awaited holder is absent; None until this process knows the time."""
        self.missing = set(saved.members) if came_back else set()
        """Islands of the last round that have not returned since the coordinator was restarted."""

    def hold(self, one: Island) -> None:
        """Record that the connected island `one` has the anchor of its version.

        Anchors outside the lineage are ignored.
        """
        self._mark_returned(one.number)
        if one.version in self._saved.lineage:
            self._saved.holders[one.number] = Holder(one.version, one.host, one.patience)
        else:
            self._saved.holders.pop(one.number, None)

    def replace(self, number: int) -> None:
        """Record that another process has loaded the checkpoint of island `number`, and replaces it from now on."""
        self._mark_returned(number)
        self._saved.holders.pop(number, None)

    def lose(self, number: int, now: float) -> None:
        """Record that island `number` is not connected any more."""
        if number in self._saved.holders:
            self._absent_since[number] = now

    def remove(self, numbers: Iterable[int]) -> None:
        """Remove the islands `numbers` for good."""
        removed, saved = set(numbers), self._saved
        for number in removed:
            self._mark_returned(number)
        saved.members = [number for number in saved.members if number not in removed]
        saved.holders = {number: holder for number, holder in saved.holders.items() if number not in removed}

    def expire(self, now: float) -> None:
        """Stop waiting for islands that have been absent for longer than their patience.

        Before the first exchange nothing is lost with them, so they are forgotten.
        """
        for number, since in list(self._absent_since.items()):
            one = self._saved.holders.get(number)
            if one is None or (since is not None and now - since > one.patience):
                del self._absent_since[number]
                if self._saved.unproven:
                    self._saved.holders.pop(number, None)
            elif since is None:
                self._absent_since[number] = now

    def commit(self, connected: Collection[int]) -> None:
        """Record a committed round. Islands that are neither `connected` nor awaited are removed."""
        self.missing.clear()
        kept = {*connected, *self._absent_since}
        self._saved.holders = {number: holder for number, holder in self._saved.holders.items() if number in kept}

    def awaited(self) -> Iterator[int]:
        """Yield the versions that awaited absent islands hold."""
        holders = self._saved.holders
        yield from (holders[number].version for number in self._absent_since if number in holders)

    def absent(self, connected: Collection[int], since: int) -> dict[int, Holder]:
        """Return the holders that are not `connected`, and have a newer anchor than version `since`."""
        holders = sorted(self._saved.holders.items())
        return {number: one for number, one in holders if number not in connected and one.version > since}

    def has_majority(self, patient: bool = False) -> bool:
        """Return True if more than half of the islands of the last round are back, or have left.

        Without `patient`, only islands that have not returned to a restarted coordinator count as absent. With it, all
        absent islands do, as long as they are awaited.
        """
        absent = self.missing | ({*self._absent_since} & {*self._saved.members} if patient else set())
        return 2 * len(absent) < max(1, len(self._saved.members))

    def _mark_returned(self, number: int) -> None:
        self._absent_since.pop(number, None)
        self.missing.discard(number)


class Membership:
    """Islands of a run.

    Args:
        saved: the state that outlives the coordinator.
        came_back: True if `saved` is from an earlier process.
        log: receives log lines.

    Attributes:
        connected: the connected islands, by the name of their process.
        known: the islands that hold an anchor and have not left, whether connected or not.
    """

    def __init__(self, saved: Saved, came_back: bool, log: Callable[[str], None]) -> None:
        self.saved, self.log = saved, log
        self.known = KnownIslands(saved, came_back)
        self.connected: dict[str, Island] = {}
        self._outbox: list[tuple[str, Message]] = []

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

    def send(self, name: str, message: Message) -> None:
        """Queue `message` for the island `name`."""
        self._outbox.append((name, message))

    def explain(self, name: str, why: str) -> None:
        """Tell the connected island `name`, and the log, why it waits."""
        self.log(f"{self.connected[name].title} waits: {why}")
        self.send(name, {"kind": "waiting", "why": why})

    def take_messages(self) -> list[tuple[str, Message]]:
        """Remove and return the queued messages, in order, each with the name of its island."""
        messages, self._outbox = self._outbox, []
        return messages

    def join(self, name: str, join: Join, now: float) -> None:
        """Add the island `name`, or refuse it."""
        problem = self._find_problem(name, join)
        if problem:
            self.send(name, {"kind": "refused", "why": problem})
            return
        if not self._has_agreed_terms():
            self.saved.terms = join.terms
        earlier, number = self.connected.get(name), join.number
        if earlier is not None:
            number = earlier.number
        elif number is None:
            number, self.saved.next_number = self.saved.next_number, self.saved.next_number + 1
        self.connected[name] = island = Island(number, join)
        island.arrived = None if earlier is None else earlier.arrived
        self.set_version(island, join.version)
        self.log(f"{island.title} joined; {len(self.connected)} connected")
        self.send(name, {"kind": "welcome", "run": self.saved.run, "number": number})

    def set_version(self, island: Island, version: int) -> None:
        """Record that the connected `island` has the anchor of `version` from now on; 0 for none."""
        island.version = version
        self.known.hold(island)

    def order(self, saved: Mapping[str, int]) -> None:
        """Give the numbers of some islands to the same islands, in the order of the numbers with which they `saved`.

        A place in a round and the order of data follow from the number. So a run that is resumed under a new
        coordinator continues bit for bit, in whichever order its islands join. Numbers of absent islands stay theirs.

        Args:
            saved: number in the checkpoint by the name of the island's process; -1 if there is none.
        """
        before = {name: self.connected[name].number for name in saved}
        names = sorted(saved, key=lambda name: (saved[name], before[name]))
        for name, number in zip(names, sorted(before.values()), strict=True):
            self.connected[name].number = number
            self.send(name, {"kind": "welcome", "run": self.saved.run, "number": number})

    def numbers(self) -> set[int]:
        """Return the numbers of the connected islands."""
        return {one.number for one in self.connected.values()}

    def newest_connected(self) -> int:
        """Return the newest version of the lineage that a connected island has; 0 for none."""
        lineage = {*self.saved.lineage}
        return max((one.version for one in self.connected.values() if one.version in lineage), default=0)

    def newest(self) -> int:
        """Return the version from which the run continues: the newest one of awaited islands; 0 for none."""
        return max((self.newest_connected(), *self.known.awaited()))

    def absent(self, since: int) -> Mapping[int, Holder]:
        """Return the absent islands that have a newer anchor than version `since`, or may have one."""
        absent = self.known.absent(self.numbers(), since)
        return {**dict.fromkeys(sorted(self.known.missing), Holder(0)), **absent}

    def required_absent(self) -> Mapping[int, Holder]:
        """Return the absent islands without which the run does not continue from what is connected."""
        return self.absent(since=self.newest_connected())

    def _has_agreed_terms(self) -> bool:
        """Return True if terms have to stay as they are, because an island that has not left has agreed to them."""
        return self.saved.terms is not None and bool(self.connected or self.saved.holders)

    def _find_problem(self, name: str, join: Join) -> str:
        """Return why the island may not join; "" if it may."""
        saved, others = self.saved, {other: one for other, one in self.connected.items() if other != name}
        if join.run is not None and join.run != saved.run:
            return f"the coordinator serves run {saved.run}, and the island belongs to run {join.run}"
        if (join.number or 0) >= max(1, saved.next_number) or join.version >= saved.next_round:
            # The island knows more of the run than its coordinator.
            return (
                f"island {join.number} with version {join.version} is not known to run {saved.run}, which has had "
                f"{saved.next_number} islands and {saved.next_round - 1} versions: the coordinator was started from "
                "an older state; start it from the newest one"
            )
        if any(one.number == join.number for one in others.values()):
            return f"island {join.number} is already connected from another process"
        if join.process and any(one.join.process == join.process for one in others.values()):
            return f"process {join.process} already is an island with another engine, and would wait for itself"
        text = different_terms(join.terms, (saved.terms or {}) if self._has_agreed_terms() else join.terms)
        if text and not self.connected:
            return f"{text}; {absent_holders(self.known.absent((), since=0))}"
        return text


# Reasons for which islands wait or are refused.


def too_few(minimum: int, count: int) -> str:
    """Return the reason for waiting if only `count` islands are connected, or have loaded a checkpoint."""
    return f"at least {minimum} islands are needed (minimum), and there are {count}"


def absent_holders(absent: Mapping[int, Holder]) -> str:
    """Return the reason that the `absent` islands have the newest weights, or may have them."""
    names = ", ".join(f"island {number} ({one.host or 'unknown host'})" for number, one in absent.items())
    return (
        f"{names[:_LONGEST]}: not connected, but may have the newest weights of this run, and not left it; start these "
        "islands again from a checkpoint, or continue without them: ds-compress islands forget HOST:PORT "
        f"{' '.join(map(str, absent))[:_LONGEST]}"
    )


def different_terms(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return a description of the terms in which an island differs from the others; "" if there are none."""
    different = [key for key in dict.fromkeys([*own, *theirs]) if own.get(key) != theirs.get(key)]
    text = "; ".join(f"{key} is {own.get(key)!r}, that of the others {theirs.get(key)!r}" for key in different)
    return text[:_LONGEST]
