"""Checkpoints of this rank on their way to one place: when they are due, the process that writes them, and what it has
said."""

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace

from deepspeed_compress.checkpoints.snapshot import Memory
from deepspeed_compress.checkpoints.writer import Outcome, Task, Writer
from deepspeed_compress.config.durations import seconds
from deepspeed_compress.engine.checkpoints.side_stream import make_memory

__all__ = ["Interval", "Lane"]

_BUFFERS = 2
"""Snapshots in memory: one may be written while the next is taken."""


@dataclass
class Interval:
    """`every` so many steps, or after a time, which the first rank looks at; None: never. `due`: it has come."""

    every: int | str | None
    due: bool = False
    last: float = field(default_factory=time.monotonic)

    @property
    def by_time(self) -> bool:
        return isinstance(self.every, str)

    def has_passed(self) -> bool:
        """Whether the time is over."""
        return isinstance(self.every, str) and time.monotonic() - self.last >= seconds(self.every)

    def says(self, step: int) -> bool:
        """A step that is said is kept to: saving makes compressed weights exact, which must not depend on a disk."""
        return isinstance(self.every, int) and step % self.every == 0

    def begin(self) -> None:
        self.due, self.last = False, time.monotonic()


class Lane:
    """One checkpoint may be written while the next is saved; a third one waits.

    Args:
        interval: when one is saved that nobody asked for.
        rate: bytes a second at which files are written; None as fast as it goes.
        private: files are for this user alone.
    """

    def __init__(self, interval: Interval, rate: float | None = None, private: bool = False) -> None:
        self.interval, self.rate = interval, rate
        self.begun = 0
        """Number of the last one that was saved."""
        self.agreed = 0
        """Up to which all ranks have written theirs, or failed to."""
        self._private = private
        self._writer: Writer | None = Writer(private)
        self._free = [make_memory() for _ in range(_BUFFERS)]
        self._used: list[tuple[Task, Memory]] = []
        self._sent: list[Task] = []
        self._failed: list[Outcome] = []
        self._notices: list[str] = []

    @property
    def in_flight(self) -> bool:
        """Whether one is being written on any rank, as far as all know."""
        return self.agreed < self.begun

    @property
    def ended(self) -> int:
        """Up to which this rank has written them, or failed to."""
        return self._used[0][0].save.number - 1 if self._used else self.begun

    @property
    def copied(self) -> int:
        """Up to which copies of this rank's files have arrived elsewhere, or never will."""
        return self._sent[0].save.number - 1 if self._sent else self.begun

    @property
    def failed(self) -> bool:
        return bool(self._failed)

    def take_failures(self) -> list[Outcome]:
        """What has failed since the last call."""
        failed, self._failed = self._failed, []
        return failed

    def take_notices(self) -> list[str]:
        """Return what went wrong since the last call beside checkpoints that are whole."""
        notices, self._notices = self._notices, []
        return notices

    def take_memory(self) -> Memory:
        """Memory that nobody uses."""
        while not self._free:
            self.collect(wait=True)
        return self._free.pop()

    def give_back(self, memory: Memory) -> None:
        """Nothing was sent of it."""
        self._free.append(memory)

    def begin(self, task: Task, memory: Memory) -> None:
        """`task` will be sent, with what is then in `memory`."""
        self._used.append((task, memory))
        self.begun = task.save.number
        if task.copy is not None:
            self._sent.append(task)

    def send(self, task: Task, memory: Memory) -> None:
        """Have it written. A process that is gone shows when its outcome is asked for."""
        assert self._writer is not None, "the engine is destroyed"
        with suppress(OSError):
            self._writer.send(task, memory.descriptor)

    def collect(self, wait: bool) -> None:
        """What this rank's process has done since; with `wait` at least one thing. No snapshot may be on its way."""
        assert self._writer is not None, "the engine is destroyed"
        try:
            outcomes = self._writer.outcomes(wait)
        except (EOFError, OSError):
            self._begin_anew()
            return
        for outcome in outcomes:
            if outcome.of_copy:
                self._sent.pop(0)
            else:
                self._free.append(self._used.pop(0)[1])
            if outcome.problem:
                self._failed.append(outcome)
            if outcome.notice:
                self._notices.append(outcome.notice)

    def finish(self) -> None:
        """Until this rank has written everything, and sent it."""
        while self._used or self._sent:
            self.collect(wait=True)

    def close(self) -> None:
        """The process ends. A second call does nothing."""
        if self._writer is not None:
            self.finish()
            self._writer.close()
            self._writer = None

    def _begin_anew(self) -> None:
        """The process has died. Another one tells those who wait for what it was to write, and writes what comes."""
        assert self._writer is not None
        self._writer.close()
        self._writer = Writer(self._private)
        died = "the process that writes for this rank has died"
        lost = [task for task in self._sent if task.save.number <= self.ended]
        self._failed += [Outcome(task.save, died, of_copy=True) for task in lost]
        self._sent = self._sent[len(lost) :]
        for task, memory in self._used:
            self.send(replace(task, problem=died), memory)
