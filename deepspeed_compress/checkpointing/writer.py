"""The writer process of a rank, which is forked from it and runs until all snapshots are written.

A fork shares all modules that are needed to read snapshots, at no cost of memory. It holds none of the rank's sockets,
so others notice when the rank dies, and it then continues to write.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, sendfds
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any, TypeVar, cast

import torch

from deepspeed_compress.checkpointing import catalog
from deepspeed_compress.checkpointing import completeness as files
from deepspeed_compress.checkpointing.claim import Claim
from deepspeed_compress.checkpointing.completeness import FileList, Save
from deepspeed_compress.checkpointing.direct import DirectFile
from deepspeed_compress.checkpointing.memory_copies import Destination, send_copies
from deepspeed_compress.checkpointing.memory_directory import keep_only
from deepspeed_compress.checkpointing.movement import Movement
from deepspeed_compress.checkpointing.processes import fork_from_rank, wait_for
from deepspeed_compress.checkpointing.snapshot import Call, Kept, read_calls
from deepspeed_compress.errors import StateError
from deepspeed_compress.safe_files import temporary

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds between looks at the lists of all ranks, at first and at most. Hundreds of lists load a file server."""


@dataclass(frozen=True)
class Task:
    """A snapshot to write under a `claim`.

    Attributes:
        save: the save.
        rank: the rank.
        claim: the claim on the directory.
        kept: description of the snapshot.
        publishes: this rank lets `latest` name the checkpoint once all ranks have written theirs, and prunes old ones.
        patience: seconds to wait for all ranks.
        keep: number of automatic checkpoints to keep; None for all.
        ended: number of the last save that all ranks have written or failed to write.
        problem: reason why it cannot be written, to be reported to the other ranks.
        only: for checkpoints in memory, the tags to keep, including this one. All others are removed before writing.
        copy: destination for a copy of the files.
    """

    save: Save
    rank: int
    claim: Claim
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
        notice: what else went wrong although the checkpoint is complete.
    """

    save: Save
    problem: str
    of_copy: bool = False
    notice: str = ""


class Writer:
    """Handle of the writer process, used by its rank. `private`: only this user can access the files."""

    def __init__(self, private: bool = False) -> None:
        self._connection, theirs = Pipe()
        self.process = fork_from_rank(partial(_write_all, theirs, private), {theirs.fileno()})
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


def _write_all(connection: Connection, private: bool) -> None:
    """Write snapshots until the rank closes `connection` or dies. This is all that the writer process does."""
    if private:
        os.umask(0o077)
        # Every file has a digest, and only torch.load reads it.
        torch.serialization.set_crc32_options(False)
    sending, movement = Lock(), Movement()
    failed: list[Task] = []
    while True:
        try:
            task: Task = connection.recv()
            descriptor = recv_handle(connection)
        except (EOFError, OSError):
            break
        for one in failed:
            # A save of the same tag replaces these files itself, and needs the directory.
            if one.save.number <= task.ended and one.save.place != task.save.place:
                tried(partial(_discard, one))
        failed = [one for one in failed if one.save.number > task.ended]
        listed, problem = tried(partial(_write, task, descriptor))
        os.close(descriptor)
        if problem and task.publishes:
            failed.append(task)
        _, notice = tried(partial(_prune, task)) if not problem else (None, "")
        _report(connection, sending, Outcome(task.save, problem, notice=notice))
        if task.copy is not None:
            # The next checkpoint must not wait for the network.
            movement.note(task.save)
            Thread(target=_copy, args=(connection, sending, task, listed, problem, movement), daemon=True).start()
    # The end of a rank must not wait for a silent host.
    movement.wait()


def _report(connection: Connection, sending: Lock, outcome: Outcome) -> None:
    # The rank may have died or stopped reading. What it sent before is written anyway.
    with suppress(OSError), sending:
        connection.send(outcome)


def _copy(
    connection: Connection, sending: Lock, task: Task, listed: FileList | None, problem: str, movement: Movement
) -> None:
    if listed is not None and task.copy is not None:
        _, problem = tried(partial(send_copies, task.save.place, listed, task.copy, partial(movement.note, task.save)))
    _report(connection, sending, Outcome(task.save, problem, of_copy=True))
    movement.end(task.save)


def tried(work: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of `work` and an error text. Any error is reported to the training process, which continues."""
    try:
        return work(), ""
    except Exception as error:
        return None, _told(error)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"


def _write(task: Task, descriptor: int) -> FileList:
    written: list[Path] = []
    digests: dict[Path, str] = {}
    try:
        if task.problem:
            raise StateError(task.problem)
        with task.claim.held():
            if task.only is not None:
                keep_only(task.save, task.only)
            files.begin_list(task.save, task.rank)
        for call in read_calls(task.kept, descriptor):
            written += call.files
            digests |= _carry_out(call, task)
        listed = files.listed(task.save, task.rank, digests)
        with task.claim.held():
            files.write_list(task.save.place, listed)
    except Exception as error:
        with suppress(OSError, StateError), task.claim.held():
            # The list needs room on a full disk, and so do later saves.
            files.remove_files(written)
            # Spare the rank that waits for all lists from waiting for this one.
            files.write_list(task.save.place, files.listed(task.save, task.rank, {}, _told(error)))
        raise
    if task.publishes:
        _await_lists(task)
        with task.claim.held():
            catalog.publish(task.save)
    return listed


def _discard(task: Task) -> None:
    with task.claim.held():
        files.discard(task.save)


def _prune(task: Task) -> None:
    """Remove old checkpoints, and old files of the same tag, once the new one is complete."""
    if task.publishes:
        with task.claim.held():
            files.remove_unlisted(task.save)
            if task.keep is not None:
                catalog.prune(task.save.directory, task.keep)


def _carry_out(call: Call, task: Task) -> dict[Path, str]:
    """Run the call, and return the SHA-256 of each of its files."""
    files.check_place(task.save)
    task.claim.check()
    known = call.function(*call.arguments) or {}
    return {file: known.get(file) or files.digest(file) for file in call.files}


def _await_lists(task: Task) -> None:
    """Wait until all ranks have listed their files.

    Raises:
        StateError: `patience` has elapsed, a rank has failed, or a later start has taken the directory.
    """
    deadline, pause = time.monotonic() + task.patience, _FIRST_PAUSE
    while missing := files.find_missing(task.save):
        task.claim.check()
        if time.monotonic() > deadline:
            raise StateError(
                f"{task.save.place}: ranks {missing} have not listed their files in {task.patience:.0f} s; do all "
                "hosts share this directory?"
            )
        time.sleep(pause)
        pause = min(1.1 * pause, _LONGEST_PAUSE)


def write_torch(
    state: Any, path: Path, max_rate: float | None, held: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Mapping[Path, str]:
    """Write `state` to `path` by `torch.save`, and return the SHA-256 of the file.

    It is written under a temporary name, which is renamed while `held()` is entered, at no more than `max_rate` bytes
    per second. Removes what writers that were killed have left of the same file.
    """
    for left in path.parent.glob(f"{escape(path.name)}.*.tmp"):
        left.unlink(missing_ok=True)
    scratch = temporary(path)
    try:
        with DirectFile(scratch, max_rate) as stream:
            torch.save(state, cast(IO[bytes], stream))
            digest = stream.finish()
        with held():
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return {path: digest}
