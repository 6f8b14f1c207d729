"""Islands that are known and have not left, whether they are connected or not.

A lost connection does not show whether an island has died, or is cut off with weights that no other island has. So the
anchor of an absent island stays valid until it leaves, a user declares it gone, or its patience is over: an island that
is cut off for longer ends itself.
"""

from collections.abc import Collection, Iterable, Iterator

from deepspeed_compress.local_sgd.coordinator.records import Holder, Island, Saved

__all__ = ["KnownIslands"]


class KnownIslands:
    """Holders of anchors in `saved`, and the time for which each has been absent.

    `came_back` is True if `saved` is from an earlier process.
    """

    def __init__(self, saved: Saved, came_back: bool) -> None:
        self._saved = saved
        self._away: dict[int, float | None] = dict.fromkeys(saved.holders)
        """Time since which each awaited holder is absent; None until this process knows the time."""
        self._missing = set(saved.members) if came_back else set()

    def hold(self, one: Island) -> None:
        """Record that the connected island `one` has the anchor of its version.

        Anchors outside the lineage are ignored.
        """
        self._back(one.number)
        if one.version in self._saved.lineage:
            self._saved.holders[one.number] = Holder(one.version, one.host, one.patience)
        else:
            self._saved.holders.pop(one.number, None)

    def replace(self, number: int) -> None:
        """Record that another process has loaded the checkpoint of island `number`, and replaces it from now on."""
        self._back(number)
        self._saved.holders.pop(number, None)

    def lose(self, number: int, now: float) -> None:
        """Record that island `number` is not connected any more."""
        if number in self._saved.holders:
            self._away[number] = now

    def give_up(self, numbers: Iterable[int]) -> None:
        """Remove the islands `numbers`, which are gone for good."""
        for number in numbers:
            self._back(number)
        self._saved.give_up(numbers)

    def expire(self, now: float) -> None:
        """Stop waiting for islands that have been absent for longer than their patience.

        Before the first exchange nothing is lost with them, so they are forgotten.
        """
        for number, since in list(self._away.items()):
            one = self._saved.holders.get(number)
            if one is None or (since is not None and now - since > one.patience):
                del self._away[number]
                if self._saved.unproven:
                    self._saved.holders.pop(number, None)
            elif since is None:
                self._away[number] = now

    def commit(self, there: Collection[int]) -> None:
        """Record a committed round. Islands that are neither connected (`there`) nor awaited are given up."""
        self._missing.clear()
        kept = {*there, *self._away}
        self._saved.holders = {number: one for number, one in self._saved.holders.items() if number in kept}

    def awaited(self) -> Iterator[int]:
        """Yield the versions that awaited absent islands hold."""
        holders = self._saved.holders
        yield from (holders[number].version for number in self._away if number in holders)

    def absent(self, there: Collection[int], since: int) -> dict[int, Holder]:
        """Return the holders that are not `there`, and have a newer anchor than version `since`."""
        holders = sorted(self._saved.holders.items())
        return {number: one for number, one in holders if number not in there and one.version > since}

    @property
    def missing(self) -> list[int]:
        """Return the islands of the last round that have not returned since the coordinator was restarted."""
        return sorted(self._missing)

    def has_majority(self, patient: bool = False) -> bool:
        """Return True if more than half of the islands of the last round are back, or have left.

        Without `patient`, only islands that have not returned to a restarted coordinator count as absent. With it, all
        absent islands do, as long as they are awaited.
        """
        absent = self._missing | ({*self._away} & {*self._saved.members} if patient else set())
        return 2 * len(absent) < max(1, len(self._saved.members))

    def _back(self, number: int) -> None:
        self._away.pop(number, None)
        self._missing.discard(number)
