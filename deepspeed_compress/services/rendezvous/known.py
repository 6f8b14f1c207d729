"""Islands that are known and have not left, whether they are connected or not.

A lost connection says nothing: an island may have died, or be cut off with weights that nobody else has. So what an
absent island holds stays in force until it leaves, somebody declares it gone, or its patience is over: an island that
is cut off for longer ends by itself.
"""

from collections.abc import Collection, Iterable, Iterator

from deepspeed_compress.services.rendezvous.records import Holder, Island, Saved

__all__ = ["Known"]


class Known:
    """The holders of `saved`, and how long each has been absent. `came_back`: `saved` is that of an earlier process."""

    def __init__(self, saved: Saved, came_back: bool) -> None:
        self._saved = saved
        self._away: dict[int, float | None] = dict.fromkeys(saved.holders)
        """Since when each holder that is waited for is absent; None until this process knows the time."""
        self._missing = set(saved.members) if came_back else set()

    def hold(self, one: Island) -> None:
        """The connected island `one` has the anchor of its version. One that is not of the lineage means nothing."""
        self._back(one.number)
        if one.version in self._saved.lineage:
            self._saved.holders[one.number] = Holder(one.version, one.host, one.patience)
        else:
            self._saved.holders.pop(one.number, None)

    def replace(self, number: int) -> None:
        """Another process has loaded what island `number` saved, and stands for it from now on."""
        self._back(number)
        self._saved.holders.pop(number, None)

    def lose(self, number: int, now: float) -> None:
        """Island `number` is not connected any more."""
        if number in self._saved.holders:
            self._away[number] = now

    def give_up(self, numbers: Iterable[int]) -> None:
        """The islands `numbers` are gone for ever."""
        for number in numbers:
            self._back(number)
        self._saved.give_up(numbers)

    def expire(self, now: float) -> None:
        """Stop waiting for those that have been absent for longer than their patience. Before anything was exchanged
        nothing is lost with them, so they are forgotten."""
        for number, since in list(self._away.items()):
            one = self._saved.holders.get(number)
            if one is None or (since is not None and now - since > one.patience):
                del self._away[number]
                if self._saved.unproven:
                    self._saved.holders.pop(number, None)
            elif since is None:
                self._away[number] = now

    def commit(self, there: Collection[int]) -> None:
        """A round is committed while the islands `there` are connected: the others are waited for, or are given up."""
        self._missing.clear()
        kept = {*there, *self._away}
        self._saved.holders = {number: one for number, one in self._saved.holders.items() if number in kept}

    def awaited(self) -> Iterator[int]:
        """Yield the versions that absent islands hold, as far as they are waited for."""
        holders = self._saved.holders
        yield from (holders[number].version for number in self._away if number in holders)

    def absent(self, there: Collection[int], since: int) -> dict[int, Holder]:
        """Return the holders that are not `there`, and have a newer anchor than version `since`."""
        holders = sorted(self._saved.holders.items())
        return {number: one for number, one in holders if number not in there and one.version > since}

    @property
    def missing(self) -> list[int]:
        """Islands of the last round that have not come back since the coordinator was started again."""
        return sorted(self._missing)

    def has_majority(self, patient: bool = False) -> bool:
        """Return True if more than half of the islands of the last round are back, or have left.

        Without `patient` only a coordinator that was started again waits for them; with it also those that are absent
        count, as long as they are waited for.
        """
        absent = self._missing | ({*self._away} & {*self._saved.members} if patient else set())
        return 2 * len(absent) < max(1, len(self._saved.members))

    def _back(self, number: int) -> None:
        self._away.pop(number, None)
        self._missing.discard(number)
