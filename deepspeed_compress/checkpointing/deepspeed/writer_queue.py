"""Pending checkpoints of this rank for one destination: when they are due, their writer process, and its results.

Snapshots are copied from a GPU on a separate stream, for which neither the host nor training waits.
"""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_compress.checkpointing.snapshot import Copies, HostCopies, Memory
from deepspeed_compress.checkpointing.writer import Outcome, Task, Writer
from deepspeed_compress.config.numbers import seconds

_BUFFERS = 2
"""Number of snapshot buffers: one may be written while the next is taken."""


@dataclass
class Interval:
    """Interval between automatic checkpoints.

    Attributes:
        every: a number of steps, or a duration, which the first rank measures; None for never.
        due: True if the duration has passed.
        last: the time of the last checkpoint (`time.monotonic`).
    """

    every: int | str | None
    due: bool = False
    last: float = field(default_factory=time.monotonic)

    def has_passed(self) -> bool:
        """Return True if the interval is a duration and has passed."""
        return isinstance(self.every, str) and time.monotonic() - self.last >= seconds(self.every)

    def is_due_at(self, step: int) -> bool:
        """Return True if a checkpoint is due at `step` by the number of steps.

        It is then saved in exactly this step: saving makes compressed weights exact, so it must not depend on the
        disk's speed.
        """
        return isinstance(self.every, int) and step % self.every == 0

    def begin(self) -> None:
        """Start a new interval."""
        self.due, self.last = False, time.monotonic()


class WriterQueue:
    """Checkpoints of this rank for one destination, each written by a separate process.

    One checkpoint may be written while the next is saved; a third one waits.

    Args:
        interval: the interval between automatic checkpoints.
        rate: bytes per second at which files are written; None for no limit.
        private: True if only this user may read the files.
    """

    def __init__(self, interval: Interval, rate: float | None = None, private: bool = False) -> None:
        self.interval, self.rate = interval, rate
        self.begun = 0
        """Number of the last checkpoint saved."""
        self.agreed = 0
        """Number of the last checkpoint that all ranks have written or failed to write."""
        self._private = private
        self._writer: Writer | None = Writer(private)
        self._free = [make_memory() for _ in range(_BUFFERS)]
        self._used: list[tuple[Task, Memory]] = []
        self._sent: list[Task] = []
        self.failed: list[Outcome] = []
        """Failures that have not been taken yet."""

    @property
    def in_flight(self) -> bool:
        """Return True if a checkpoint is still being written on some rank, as far as all ranks know."""
        return self.agreed < self.begun

    @property
    def ended(self) -> int:
        """Return the number of the last checkpoint that this rank has written or failed to write."""
        return self._used[0][0].save.number - 1 if self._used else self.begun

    @property
    def copied(self) -> int:
        """Return the number of the last checkpoint whose copy has arrived at the next host, or has failed to."""
        return self._sent[0].save.number - 1 if self._sent else self.begun

    def ranks_agreed(self, due: bool, ended: int) -> None:
        """Note an agreement of all ranks.

        Args:
            due: True if the interval has passed.
            ended: the number of the last checkpoint that all ranks have written or failed to write.
        """
        self.agreed = ended
        self.interval.due |= due

    def take_failures(self) -> list[Outcome]:
        """Return the failures since the last call."""
        failed, self.failed = self.failed, []
        return failed

    def take_memory(self) -> Memory:
        """Return a free buffer, waiting for one if necessary."""
        while not self._free:
            self.collect(wait=True)
        return self._free.pop()

    def give_back(self, memory: Memory) -> None:
        """Return a buffer that was not sent to the writer."""
        self._free.append(memory)

    def begin(self, task: Task, memory: Memory) -> None:
        """Register `task`, which will be sent with the contents of `memory`."""
        self._used.append((task, memory))
        self.begun = task.save.number
        if task.copy is not None:
            self._sent.append(task)

    def send(self, task: Task, memory: Memory) -> None:
        """Send `task` to the writer process. A process that died is noticed when its outcome is collected."""
        assert self._writer is not None, "the engine is destroyed"
        with suppress(OSError):
            self._writer.send(task, memory.descriptor)

    def collect(self, wait: bool) -> None:
        """Process the outcomes that the writer process has reported. No snapshot may be in the process of being sent.

        Args:
            wait: True to wait for at least one outcome.
        """
        assert self._writer is not None, "the engine is destroyed"
        try:
            for outcome in self._writer.outcomes(wait):
                if outcome.of_copy:
                    self._sent.pop(0)
                else:
                    self._free.append(self._used.pop(0)[1])
                self.failed += [outcome] if outcome.problem else []
        except (EOFError, OSError):
            self._replace_writer()

    def finish(self) -> None:
        """Wait until this rank has written everything, and sent all copies."""
        while self._used or self._sent:
            self.collect(wait=True)

    def close(self) -> None:
        """Finish, end the writer process, and free all memory. A second call does nothing."""
        if self._writer is not None:
            self.finish()
            self._writer.close()
            self._writer = None
            for memory in self._free:
                memory.close()

    def _replace_writer(self) -> None:
        """Replace the writer process, which has died.

        The new process reports the lost checkpoints to the ranks that wait for them, and writes later ones.
        """
        assert self._writer is not None
        self._writer.close()
        self._writer = Writer(self._private)
        died = "the writer process of this rank has died"
        lost = [task for task in self._sent if task.save.number <= self.ended]
        self.failed += [Outcome(task.save, died, of_copy=True) for task in lost]
        self._sent = self._sent[len(lost) :]
        for task, memory in self._used:
            self.send(replace(task, problem=died), memory)


def copies_for_device() -> Copies:
    """Return the kind of copies with which snapshots are taken from this process's accelerator."""
    accelerator = get_accelerator()
    return HostCopies() if accelerator.is_synchronized_device() else StreamCopies(accelerator.Stream())


def make_memory() -> Memory:
    """Return snapshot memory, pinned on CUDA. Without pinning, copies are correct but slower."""
    if get_accelerator().device_name() != "cuda":
        return Memory()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return Memory(
        pin=lambda memory: runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0),
        unpin=lambda memory: runtime.cudaHostUnregister(memory.data_ptr()),
    )


class StreamCopies:
    """Copies on a separate stream.

    `stream` waits for the current stream's earlier work, and the current stream's later work waits for the copies.
    Sources are kept alive until `finish`.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._read: list[Tensor] = []

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Start the copies: pairs of (host target, device source)."""
        self._stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                self._read.append(source)
        self._hold_up()

    def _hold_up(self) -> None:
        """Make the current stream wait for the copies.

        Otherwise the program could change the sources, or the allocator reuse them, before they are read.
        """
        get_accelerator().current_stream().wait_stream(self._stream)

    def finish(self) -> None:
        """Wait on the host for the copies, and release the sources."""
        self._stream.synchronize()
        self._read.clear()
