"""Progress of pending checkpoints, as all ranks agree on it."""

import warnings
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.sigterm import SigtermHandler
from deepspeed_compress.checkpointing.deepspeed.memory_placement import HostMemory
from deepspeed_compress.checkpointing.deepspeed.writer_queue import WriterQueue
from deepspeed_compress.checkpointing.writer import Outcome
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.errors import CompressWarning, StateError


class Progress:
    """Progress of checkpoints on all ranks.

    Ranks start an agreement at the end of a step, and have the answer at the end of the next: which checkpoints are
    written everywhere, which are due, what has failed, and whether any rank received SIGTERM.

    Args:
        queues: the writer queues of this rank: that of the disk first, and that of memory last if it is used.
        memory: checkpoints in host memory; None if none are saved there.
        sigterm: the SIGTERM handler; None if ranks do not save on SIGTERM.
        stops: True if a failed write is an error on all ranks, False if it is a warning.
        group: all ranks.
    """

    def __init__(
        self,
        queues: Sequence[WriterQueue],
        memory: HostMemory | None,
        sigterm: SigtermHandler | None,
        stops: bool,
        group: ProcessGroup,
    ) -> None:
        self.is_leaving = False
        """True if any rank has received SIGTERM."""
        self._queues, self._memory, self._sigterm, self._stops = queues, memory, sigterm, stops
        self._group, self._rank = group, group.rank()
        self._numbers = torch.zeros(0, dtype=torch.int64)
        self._agreement: dist.Work | None = None
        """Pending maximum of the numbers over all ranks, which is available in the next step; None if none is."""

    def process_answers(self) -> None:
        """Process the answers of a pending agreement, and the messages of this rank's writer processes.

        Raises:
            StateError: a rank could not write, and `stops`. Raised on all ranks; otherwise a CompressWarning is issued.
        """
        if self._agreement is not None:
            self._apply(*self._finish_agreement())
        for queue in self._queues:
            queue.collect(wait=False)

    def ask_if_needed(self) -> None:
        """Start an agreement unless nothing is pending or can become due. Collective; all ranks decide alike."""
        sending = self._memory is not None and self._memory.catalog.sending
        waiting = any(queue.in_flight or isinstance(queue.interval.every, str) for queue in self._queues)
        if sending or self._sigterm is not None or waiting:
            self._ask()

    def wait(self) -> None:
        """Wait until everything is written on all ranks. Collective; raises like `process_answers`."""
        for queue in self._queues:
            queue.finish()
        if self._agreement is not None:
            self._finish_agreement()
        self._ask()
        self._apply(*self._finish_agreement())

    def close(self) -> None:
        """Wait until this rank has written everything, and warn of failed writes to disk.

        Not collective: other ranks, or the group, may no longer exist.
        """
        for queue in self._queues:
            queue.close()
        with suppress(RuntimeError):
            if self._agreement is not None:
                self._finish_agreement()
        for failure in self._queues[0].take_failures():
            warnings.warn(self._description(failure), CompressWarning, stacklevel=3)

    def _finish_agreement(self) -> list[int]:
        """Wait for the pending agreement, and return the maximum of each number over all ranks."""
        assert self._agreement is not None, "no agreement is pending"
        self._agreement.wait()
        self._agreement = None
        return [int(number) for number in self._numbers]

    def _ask(self) -> None:
        queues = [(not self._rank and queue.interval.has_passed(), -queue.ended) for queue in self._queues]
        failed = any(queue.failed for queue in self._queues)
        asked = self._sigterm is not None and self._sigterm.received
        numbers = (asked, failed, -self._queues[-1].copied, *(number for one in queues for number in one))
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        self._agreement = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _apply(self, leaves: int, failed: int, copied: int, *queues: int) -> None:
        self.is_leaving |= bool(leaves)
        for queue, due, ended in zip(self._queues, queues[::2], queues[1::2], strict=True):
            queue.ranks_agreed(bool(due), -ended)
        if self._memory is not None:
            self._memory.catalog.ranks_agreed(self._queues[-1].agreed, -copied)
        if failed:
            self._report()

    def _report(self) -> None:
        """Report, on all ranks, what failed on any. Collective."""
        own = [(failure, self._description(failure)) for queue in self._queues for failure in queue.take_failures()]
        found = [failure for some in gather_objects(own, self._group) for failure in some]
        for failure, _ in found:
            if self._memory is not None and failure.save.directory.name == self._memory.directory.name:
                self._memory.catalog.mark_failed(failure.save.number, failure.of_copy)
        if found and self._stops:
            raise StateError("; ".join(text for _, text in found))
        for _, text in found:
            warnings.warn(text, CompressWarning, stacklevel=4)

    def _description(self, failure: Outcome) -> str:
        done = "copied to the next host" if failure.of_copy else "saved"
        return f"{failure.save.place} is not {done}: rank {self._rank}: {failure.problem}"
