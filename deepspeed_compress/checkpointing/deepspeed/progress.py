"""Progress of pending checkpoints, as all ranks agree on it."""

import warnings
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.leaving import Leaving
from deepspeed_compress.checkpointing.deepspeed.agreement import Agreement
from deepspeed_compress.checkpointing.deepspeed.memory_placement import HostMemory
from deepspeed_compress.checkpointing.deepspeed.recovery import gathered
from deepspeed_compress.checkpointing.deepspeed.writer_queue import Lane
from deepspeed_compress.checkpointing.writer import Outcome
from deepspeed_compress.errors import CompressWarning, StateError

__all__ = ["Progress"]


class Progress:
    """Progress of checkpoints on all ranks.

    Ranks start an agreement at the end of a step, and have the answer at the end of the next: which checkpoints are
    written everywhere, which are due, what has failed, and whether any rank received SIGTERM.

    Args:
        lanes: the lanes of this rank: disk first, and memory last if it is used.
        memory: checkpoints in host memory; None if none are saved there.
        leaving: the SIGTERM handler; None if ranks do not save on SIGTERM.
        stops: True if a failed write is an error on all ranks, False if it is a warning.
        group: all ranks.
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
        """True if any rank has received SIGTERM."""
        self._lanes, self._memory, self._leaving, self._stops = lanes, memory, leaving, stops
        self._agreement, self._rank = Agreement(group), group.rank()

    def hear(self) -> None:
        """Process the answers of a pending agreement, and the messages of this rank's writer processes.

        Raises:
            StateError: a rank could not write, and `stops`. Raised on all ranks; otherwise a CompressWarning is issued.
        """
        if self._agreement.work is not None:
            self._take(*self._agreement.finish())
        for lane in self._lanes:
            lane.collect(wait=False)
        self._warn_of_notices()

    def ask_where_needed(self) -> None:
        """Start an agreement unless nothing is pending or can become due. Collective; all ranks decide alike."""
        sending = self._memory is not None and self._memory.shelf.sending
        if sending or self._leaving is not None or any(lane.in_flight or lane.interval.by_time for lane in self._lanes):
            self._ask()

    def settle(self) -> None:
        """Wait until everything is written on all ranks. Collective; raises like `hear`."""
        for lane in self._lanes:
            lane.finish()
        self._warn_of_notices()
        self._forget_question()
        self._ask()
        self._take(*self._agreement.finish())

    def close(self) -> None:
        """Wait until this rank has written everything, and warn of failed writes to disk.

        Not collective: other ranks, or the group, may no longer exist.
        """
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
            lane.ranks_agreed(bool(due), -ended)
        if self._memory is not None:
            self._memory.shelf.ranks_agreed(self._lanes[-1].agreed, -copied)
        if failed:
            self._report()

    def _report(self) -> None:
        """Report, on all ranks, what failed on any. Collective."""
        own = [(failure, self._told(failure)) for lane in self._lanes for failure in lane.take_failures()]
        found = [failure for some in gathered(own, self._agreement.group) for failure in some]
        news = [text for failure, text in found if self._is_news(failure)]
        if news and self._stops:
            raise StateError("; ".join(news))
        for text in news:
            warnings.warn(text, CompressWarning, stacklevel=4)

    def _is_news(self, failure: Outcome) -> bool:
        """Return True if `failure` is to be reported.

        A failure in memory is reported once, and again after a later save in memory has succeeded.
        """
        if self._memory is None or failure.save.directory.name != self._memory.directory.name:
            return True
        return self._memory.shelf.forget(failure.save.number, failure.of_copy)

    def _told(self, failure: Outcome) -> str:
        done = "copied to the next host" if failure.of_copy else "saved"
        return f"{failure.save.place} is not {done}: rank {self._rank}: {failure.problem}"
