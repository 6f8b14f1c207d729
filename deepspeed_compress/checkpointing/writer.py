"""The writer process of a rank, which is forked from it and runs until all snapshots are written.

A fork shares all modules that are needed to read snapshots, at no cost of memory. It holds none of the rank's sockets,
so others notice when the rank dies, and it then continues to write.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, sendfds
from pathlib import Path
from threading import Lock, Thread
from typing import TypeVar

import torch

from deepspeed_compress.checkpointing.completeness import FileList, Save, digest
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.checkpointing.memory_copies import DRAIN, Destination, send_copies
from deepspeed_compress.checkpointing.processes import fork_from_rank, wait_for
from deepspeed_compress.checkpointing.snapshot import Kept, read_calls
from deepspeed_compress.errors import StateError

T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """A snapshot to write.

    Attributes:
        directory: the directory of the save, with the claim of this start.
        save: the save.
        rank: the rank.
        kept: description of the snapshot.
        publishes: this rank lets `latest` name the checkpoint once all ranks have written theirs, and prunes old ones.
        patience: seconds to wait for all ranks.
        keep: number of automatic checkpoints to keep; None for all.
        ended: number of the last save that all ranks have written or failed to write.
        problem: reason why it cannot be written, to be reported to the other ranks.
        only: for checkpoints in memory, the tags to keep, including this one. All others are removed before writing.
        copy: destination for a copy of the files.
    """

    directory: CheckpointDirectory
    save: Save
    rank: int
    kept: Kept
    publishes: bool
    patience: float
    keep: int | None = None
    ended: int = 0
    problem: str = ""
    only: frozenset[str] | None = None
    copy: Destination | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of writing, or of sending a copy.

    Attributes:
        save: the save.
        problem: what went wrong; empty on success.
        of_copy: True for the result of sending a copy.
    """

    save: Save
    problem: str
    of_copy: bool = False


class Writer:
    """Handle of the writer process, used by its rank. `private`: only this user can access the files."""

    def __init__(self, private: bool = False) -> None:
        self._connection, theirs = Pipe()
        self.process = fork_from_rank(partial(_WriterProcess(theirs).run, private), {theirs.fileno()})
        theirs.close()
        self._socket = socket.socket(fileno=os.dup(self._connection.fileno()))
        """The same connection, which can send a descriptor while this rank has no free one."""

    def send(self, task: Task, descriptor: int) -> None:
        """Let the process write the snapshot in the memory `descriptor`.

        Raises:
            OSError: the process has ended.
        """
        self._connection.send(task)
        sendfds(self._socket, [descriptor])

    def outcomes(self, wait: bool = False) -> Iterator[Outcome]:
        """Yield the outcomes since the last call. If `wait`, wait for at least one.

        Raises:
            EOFError: the process has ended. All that it reported before has been yielded.
        """
        while self._connection.poll(None if wait else 0):
            yield self._connection.recv()
            wait = False

    def close(self) -> None:
        """Wait until the process has written everything, and end it."""
        self._connection.close()
        self._socket.close()
        wait_for(self.process)


class _WriterProcess:
    """The other end: writes snapshots until the rank closes `connection` or dies."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, Lock()
        self._copying: list[Thread] = []
        self._failed: list[Task] = []

    def run(self, private: bool) -> None:
        """Write snapshots. This is all that the process does. `private`: only this user can access the files."""
        if private:
            os.umask(0o077)
            # Every file has a digest, and only torch.load reads it.
            torch.serialization.set_crc32_options(False)
        while True:
            try:
                task: Task = self._connection.recv()
                descriptor = recv_handle(self._connection)
            except (EOFError, OSError):
                break
            self._discard_failed(task)
            self._carry_out(task, descriptor)
        # The end of a rank must not wait for a silent host.
        deadline = time.monotonic() + DRAIN
        for thread in self._copying:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _discard_failed(self, task: Task) -> None:
        """Discard the failed saves that no rank still writes when `task` begins.

        A save of the same tag replaces these files itself, and needs the directory.
        """
        for failed in self._failed:
            if failed.save.number <= task.ended and failed.save.place != task.save.place:
                tried(partial(failed.directory.discard, failed.save))
        self._failed = [failed for failed in self._failed if failed.save.number > task.ended]

    def _carry_out(self, task: Task, descriptor: int) -> None:
        listed, problem = tried(partial(_write, task, descriptor))
        os.close(descriptor)
        if task.publishes and problem:
            self._failed.append(task)
        elif task.publishes:
            # The checkpoint is complete, also if old ones stay.
            tried(partial(task.directory.tidy, task.save, task.keep))
        self._report(Outcome(task.save, problem))
        if task.copy is not None:
            # The next checkpoint must not wait for the network.
            thread = Thread(target=self._copy, args=(task, task.copy, listed, problem), daemon=True)
            self._copying = [*(copy for copy in self._copying if copy.is_alive()), thread]
            thread.start()

    def _copy(self, task: Task, destination: Destination, listed: FileList | None, problem: str) -> None:
        if listed is not None:
            _, problem = tried(partial(send_copies, task.save.place, listed, destination))
        self._report(Outcome(task.save, problem, of_copy=True))

    def _report(self, outcome: Outcome) -> None:
        # The rank may have died or stopped reading. What it sent before is written anyway.
        with suppress(OSError), self._sending:
            self._connection.send(outcome)


def tried(work: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of `work` and an error text. Any error is reported to the training process, which continues."""
    try:
        return work(), ""
    except Exception as error:
        return None, _told(error)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"


def _write(task: Task, descriptor: int) -> FileList:
    """Write the files of this rank, and publish the checkpoint if the task says so. Return the list of the files."""
    directory, save = task.directory, task.save
    written: list[Path] = []
    digests: dict[Path, str] = {}
    try:
        if task.problem:
            raise StateError(task.problem)
        directory.begin(save, task.rank, task.only)
        for call in read_calls(task.kept, descriptor):
            written += call.files
            directory.check()
            known = call.function(*call.arguments) or {}
            digests |= {file: known.get(file) or digest(file) for file in call.files}
        listed = directory.finish(save, task.rank, digests)
    except Exception as error:
        directory.fail(save, task.rank, written, _told(error))
        raise
    if task.publishes:
        directory.publish(save, task.patience)
    return listed
