"""The process that writes what a rank has kept: forked from it, in a session of its own, there until all is written.

A fork has every module that is needed to read what is kept, at no cost of memory. It holds none of the sockets of the
rank, so that others notice when the rank dies, and it goes on writing then.
"""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from threading import Lock, Thread
from typing import IO, Any, TypeVar, cast

import torch

from deepspeed_compress.checkpoints import files
from deepspeed_compress.checkpoints.claim import Claim
from deepspeed_compress.checkpoints.copies import Destination, send_copies
from deepspeed_compress.checkpoints.direct import DirectFile
from deepspeed_compress.checkpoints.files import FileList, Save
from deepspeed_compress.checkpoints.host_memory import keep_only
from deepspeed_compress.checkpoints.movement import Movement
from deepspeed_compress.checkpoints.processes import leave_rank
from deepspeed_compress.checkpoints.snapshot import Call, Kept, read_calls
from deepspeed_compress.errors import StateError

__all__ = ["Outcome", "Task", "Writer", "write_torch"]

T = TypeVar("T")

_LOOK_EVERY = 0.05


@dataclass(frozen=True)
class Task:
    """A snapshot to be written, by who has the `claim`.

    `publishes`: this rank names it `latest` once all ranks have written theirs, for which it waits `patience` seconds,
    and removes all but the `keep` newest automatic ones. `problem`: why it cannot be written, which others must hear.
    In memory: `only`, the tags that are still of use, this one among them; all others are removed before it is written.
    `copy`: where the files go besides.
    """

    save: Save
    rank: int
    claim: Claim
    kept: Kept
    publishes: bool
    patience: float
    keep: int | None = None
    problem: str = ""
    only: frozenset[str] | None = None
    copy: Destination | None = None


@dataclass(frozen=True)
class Outcome:
    """Result of writing, or of sending a copy. `problem`: "" where all went well. `notice`: what went wrong besides,
    though the checkpoint is whole."""

    save: Save
    problem: str
    of_copy: bool = False
    notice: str = ""


class Writer:
    """The process of this rank, from the side of the rank. `private`: what it writes is for this user alone."""

    def __init__(self, private: bool = False) -> None:
        self._connection, theirs = Pipe()
        self.process = os.fork()
        if not self.process:
            _serve(theirs, private)
        theirs.close()

    def send(self, task: Task, descriptor: int) -> None:
        """Have the snapshot in the memory `descriptor` written. Raises OSError when the process is gone."""
        self._connection.send(task)
        send_handle(self._connection, descriptor, self.process)

    def outcomes(self, wait: bool = False) -> list[Outcome]:
        """What has been written since the last call; with `wait` at least one. Raises EOFError when it is gone."""
        found: list[Outcome] = []
        while self._connection.poll(None if wait and not found else 0):
            found.append(self._connection.recv())
        return found

    def close(self) -> None:
        """It ends when all that was sent is written."""
        self._connection.close()
        os.waitpid(self.process, 0)


def _serve(connection: Connection, private: bool) -> None:
    """The life of the process; it does not return."""
    code = 1
    try:
        leave_rank({connection.fileno()})
        if private:
            os.umask(0o077)
            # Of every file there is a digest besides, and nothing but torch.load reads it.
            torch.serialization.set_crc32_options(False)
        code = _write_all(connection)
    finally:
        os._exit(code)


def _write_all(connection: Connection) -> int:
    said, movement = Lock(), Movement()
    while True:
        try:
            task: Task = connection.recv()
            descriptor = recv_handle(connection)
        except (EOFError, OSError):
            break
        listed, problem = _tried(partial(_write, task, descriptor))
        os.close(descriptor)
        _, notice = _tried(partial(_prune, task)) if not problem else (None, "")
        _say(connection, said, Outcome(task.save, problem, notice=notice))
        if task.copy is not None:
            # The next checkpoint need not wait for the network.
            movement.note(task)
            Thread(target=_copy, args=(connection, said, task, listed, problem, movement), daemon=True).start()
    # The end of a rank waits for no host that is silent.
    movement.wait()
    return 0


def _say(connection: Connection, said: Lock, outcome: Outcome) -> None:
    # The rank may have died, or not want to know; what it sent before is written all the same.
    with suppress(OSError), said:
        connection.send(outcome)


def _copy(
    connection: Connection, said: Lock, task: Task, listed: FileList | None, problem: str, movement: Movement
) -> None:
    if listed is not None and task.copy is not None:
        _, problem = _tried(partial(send_copies, task.save.place, listed, task.copy, partial(movement.note, task)))
    _say(connection, said, Outcome(task.save, problem, of_copy=True))
    movement.end(task)


def _tried(work: Callable[[], T]) -> tuple[T | None, str]:
    """What `work` returns, and what went wrong: whatever it is, training must hear of it and go on."""
    try:
        return work(), ""
    except Exception as error:
        return None, _told(error)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, StateError) else f"{type(error).__name__}: {error}"


def _write(task: Task, descriptor: int) -> FileList:
    with task.claim.held():
        if task.only is not None:
            keep_only(task.save.directory, task.only)
        files.unlist(task.save, task.rank)
    try:
        if task.problem:
            raise StateError(task.problem)
        digests: dict[Path, str] = {}
        for call in read_calls(task.kept, descriptor):
            digests |= _carry_out(call, task)
        listed = files.listed(task.save, task.rank, digests)
        with task.claim.held():
            files.write_list(task.save.place, listed)
    except Exception as error:
        # The rank that waits for all lists need not wait for this one.
        with suppress(OSError, StateError), task.claim.held():
            files.list_failure(task.save, task.rank, _told(error))
        raise
    if task.publishes:
        _await_lists(task)
        with task.claim.held():
            files.publish(task.save)
    return listed


def _prune(task: Task) -> None:
    """Remove old checkpoints, once the new one is whole."""
    if task.publishes and task.keep is not None:
        with task.claim.held():
            files.prune(task.save.directory, task.keep)


def _carry_out(call: Call, task: Task) -> dict[Path, str]:
    """The digests of its files."""
    files.check_place(task.save)
    task.claim.check()
    known = call.function(*call.arguments) or {}
    return {file: known.get(file) or files.digest(file) for file in call.files}


def _await_lists(task: Task) -> None:
    """Until all ranks have listed their files. Raises StateError after `patience`, where one of them has failed, or
    where the ranks are of the past."""
    deadline = time.monotonic() + task.patience
    while missing := files.find_missing(task.save):
        task.claim.check()
        if time.monotonic() > deadline:
            raise StateError(
                f"{task.save.place}: ranks {missing} have not listed their files in {task.patience:.0f} s; do all "
                "hosts share this directory?"
            )
        time.sleep(_LOOK_EVERY)


def write_torch(
    state: Any, path: Path, max_rate: float | None, held: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Mapping[Path, str]:
    """`torch.save` to `path`, by a temporary name, which is changed `held`; at most `max_rate` bytes a second. Returns
    the SHA-256 of the file."""
    temporary = files.temporary(path)
    with DirectFile(temporary, max_rate) as stream:
        torch.save(state, cast(IO[bytes], stream))
        digest = stream.finish()
    files.rename(temporary, path, held)
    return {path: digest}
