"""Islands that are known and have not left, whether they are connected or not.

A lost connection does not show whether an island has died, or is cut off with weights that no other island has. So the
anchor of an absent island stays valid until it leaves, a user removes it, or its patience is over: an island that is
cut off for longer ends itself.
"""

from collections.abc import Collection, Iterable, Iterator

from deepspeed_compress.local_sgd.coordinator.records import Holder, Island, Saved


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
        self._missing = set(saved.members) if came_back else set()

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
        for number in numbers:
            self._mark_returned(number)
        self._saved.remove(numbers)

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
        self._missing.clear()
        kept = {*connected, *self._absent_since}
        self._saved.holders = {number: one for number, one in self._saved.holders.items() if number in kept}

    def awaited(self) -> Iterator[int]:
        """Yield the versions that awaited absent islands hold."""
        holders = self._saved.holders
        yield from (holders[number].version for number in self._absent_since if number in holders)

    def absent(self, connected: Collection[int], since: int) -> dict[int, Holder]:
        """Return the holders that are not `connected`, and have a newer anchor than version `since`."""
        holders = sorted(self._saved.holders.items())
        return {number: one for number, one in holders if number not in connected and one.version > since}

    @property
    def missing(self) -> list[int]:
        """Return the islands of the last round that have not returned since the coordinator was restarted."""
        return sorted(self._missing)

    def has_majority(self, patient: bool = False) -> bool:
        """Return True if more than half of the islands of the last round are back, or have left.

        Without `patient`, only islands that have not returned to a restarted coordinator count as absent. With it, all
        absent islands do, as long as they are awaited.
        """
        absent = self._missing | ({*self._absent_since} & {*self._saved.members} if patient else set())
        return 2 * len(absent) < max(1, len(self._saved.members))

    def _mark_returned(self, number: int) -> None:
        self._absent_since.pop(number, None)
        self._missing.discard(number)
