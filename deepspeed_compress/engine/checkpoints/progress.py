"""What has become of checkpoints on their way, as all ranks know it."""

import warnings
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed import ProcessGroup

from deepspeed_compress.checkpoints.writer import Outcome
from deepspeed_compress.engine.checkpoints.agreement import Agreement
from deepspeed_compress.engine.checkpoints.host_memory import HostMemory
from deepspeed_compress.engine.checkpoints.lane import Lane
from deepspeed_compress.engine.checkpoints.recovery import gathered
from deepspeed_compress.engine.leaving import Leaving
from deepspeed_compress.errors import CompressWarning, StateError

__all__ = ["Progress"]


class Progress:
    """Ranks ask each other at the end of a step, and know at the end of the next one: which checkpoints are written
    everywhere, whose time has come, what has failed, and whether SIGTERM has come to any.

    Args:
        lanes: of this rank, the disk's first, and the memory's last where there is one.
        memory: of hosts; None where nothing is saved there.
        leaving: hears of SIGTERM; None where ranks do not save then.
        stops: what could not be written is an error of all ranks, and not a warning.
        group: of all ranks.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        memory: HostMemory | None,
        leaving: Leaving | None,
        stops: bool,
        group: ProcessGroup,
    ) -> None:
        self.leaves = False
        """SIGTERM has come to a rank."""
        self._lanes, self._memory, self._leaving, self._stops = lanes, memory, leaving, stops
        self._agreement, self._rank = Agreement(group), group.rank()

    def hear(self) -> None:
        """What ranks have answered, where they were asked, and what the process that writes for this one says.

        Raises StateError on all ranks where one could not write and that `stops`, else a CompressWarning says so.
        """
        if self._agreement.work is not None:
            self._take(*self._agreement.finish())
        for lane in self._lanes:
            lane.collect(wait=False)
        self._warn_of_notices()

    def ask_where_needed(self) -> None:
        """Unless nothing is on its way, and nothing can have come. Collective, and alike on all ranks."""
        sending = self._memory is not None and self._memory.shelf.sending
        if sending or self._leaving is not None or any(lane.in_flight or lane.interval.by_time for lane in self._lanes):
            self._ask()

    def settle(self) -> None:
        """Until everything is written on all ranks. Collective; raises as `hear`."""
        for lane in self._lanes:
            lane.finish()
        self._warn_of_notices()
        self._forget_question()
        self._ask()
        self._take(*self._agreement.finish())

    def close(self) -> None:
        """Until this rank has written everything; others may be gone, or the group. Warns of what the disk lacks."""
        for lane in self._lanes:
            lane.close()
        self._warn_of_notices()
        with suppress(RuntimeError):
            self._forget_question()
        for failure in self._lanes[0].take_failures():
            warnings.warn(self._told(failure), CompressWarning, stacklevel=3)

    def _warn_of_notices(self) -> None:
        for lane in self._lanes:
            for notice in lane.take_notices():
                text = f"the new checkpoint is whole, but old ones are left: {notice}"
                warnings.warn(text, CompressWarning, stacklevel=4)

    def _forget_question(self) -> None:
        if self._agreement.work is not None:
            self._agreement.finish()

    def _ask(self) -> None:
        lanes = [(not self._rank and lane.interval.has_passed(), -lane.ended) for lane in self._lanes]
        failed = any(lane.failed for lane in self._lanes)
        asked = self._leaving is not None and self._leaving.asked
        self._agreement.begin(asked, failed, -self._lanes[-1].copied, *(number for one in lanes for number in one))

    def _take(self, leaves: int, failed: int, copied: int, *lanes: int) -> None:
        self.leaves |= bool(leaves)
        for lane, due, ended in zip(self._lanes, lanes[::2], lanes[1::2], strict=True):
            lane.interval.due |= bool(due)
            lane.agreed = -ended
        if self._memory is not None:
            self._memory.shelf.written, self._memory.shelf.copied = self._lanes[-1].agreed, -copied
        if failed:
            self._report()

    def _report(self) -> None:
        """Tell on all ranks what went wrong on any. Collective."""
        own = [(failure, self._told(failure)) for lane in self._lanes for failure in lane.take_failures()]
        found = [failure for some in gathered(own, self._agreement.group) for failure in some]
        news = [text for failure, text in found if self._is_news(failure)]
        if news and self._stops:
            raise StateError("; ".join(news))
        for text in news:
            warnings.warn(text, CompressWarning, stacklevel=4)

    def _is_news(self, failure: Outcome) -> bool:
        """Memory that is full is told of once, and again when something has been saved there since."""
        if self._memory is None or failure.save.directory.name != self._memory.directory.name:
            return True
        return self._memory.shelf.forget(failure.save.number, failure.of_copy)

    def _told(self, failure: Outcome) -> str:
        done = "copied to the next host" if failure.of_copy else "saved"
        return f"{failure.save.place} is not {done}: rank {self._rank}: {failure.problem}"
