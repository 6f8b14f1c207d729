"""The files of a run in `monitor.path`: lines say which run they are of, and what cannot be written stops nobody."""

import fcntl
import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor.files import make_private, open_private

__all__ = ["STATISTICS", "Journal", "Part"]

STATISTICS = "compression.jsonl"
LONGEST = 1 << 16
"""Bytes in which the end of a line is looked for."""
PATIENCE = 2.0
"""Seconds for which another job is waited for that writes its line, which takes microseconds."""


@dataclass(frozen=True)
class Part:
    """What a line is of. `id`: the run, which keeps it when it is resumed. `started`: when its process did (UTC), or
    the first one of its job. `since`: the optimizer step that the process, or a checkpoint loaded in it, went on from:
    what lines of other processes say of later steps is abandoned."""

    id: str
    started: str
    since: int


class Journal:
    """Writes into `directory`; without one it does nothing. A file that cannot be written is told once in a process, as
    CompressWarning, and tried again with the next line: what only observes must never stop training."""

    def __init__(self, directory: str | None, run: str = "", step: int = 0) -> None:
        self.part = Part(run, datetime.now(UTC).isoformat(timespec="milliseconds"), step)
        self._directory = None if directory is None else Path(directory)
        self._told: set[str] = set()

    @property
    def active(self) -> bool:
        return self._directory is not None

    def add(self, name: str, fields: Mapping[str, Any]) -> None:
        """Append a line to the file `name`."""
        line = json.dumps({**fields, "run": asdict(self.part)}) + "\n"
        self._try(name, lambda file: _append(file, line.encode()))

    def write(self, name: str, text: str) -> None:
        """Write the file `name`."""
        self._try(name, lambda file: _write(file, text))

    def adopt(self, run: str | None) -> None:
        """From now on lines are of `run`, which a checkpoint was saved by; None takes the last run of the directory."""
        found = self._last() if run is None else run
        self.part = replace(self.part, id=found or self.part.id)

    def go_on(self, step: int) -> None:
        """What comes now follows optimizer step `step`."""
        self.part = replace(self.part, since=step)

    def _last(self) -> str | None:
        if self._directory is None:
            return None
        try:
            with open(self._directory / STATISTICS, "rb", opener=open_private) as file:
                # The last line may be on its way.
                found: str = json.loads(_tail(file, LONGEST).rpartition(b"\n")[0].splitlines()[-1])["run"]["id"]
                return found
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _try(self, name: str, work: Callable[[Path], object]) -> None:
        if self._directory is None:
            return
        file = self._directory / name
        try:
            try:
                work(file)
            except FileNotFoundError:
                make_private(file.parent)
                work(file)
        except OSError as error:
            self.fail("file", f"/deepspeed_compress/monitor/path: {file} cannot be written ({error.strerror or error})")

    def fail(self, kind: str, what: str) -> None:
        """Say, once of each `kind`, that something of the run is not recorded."""
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(f"{what}; training goes on, what cannot be written is lost", CompressWarning, stacklevel=2)


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8", opener=open_private) as file:
        file.write(text)


def _append(path: Path, line: bytes) -> None:
    with open(path, "a+b", opener=open_private) as file:
        # A line of another job that is on its way must not be taken for one that was cut short. Closing lifts the lock.
        _lock(file)
        if _tail(file, 1) not in (b"", b"\n"):
            # What a crash or a full disk has cut short; a line is there whole or not at all.
            rest = len(_tail(file, LONGEST).rpartition(b"\n")[2])
            file.truncate(file.seek(0, os.SEEK_END) - rest)
        file.write(line)


def _lock(file: BinaryIO) -> None:
    """BlockingIOError where another job has it for `PATIENCE`: one that was stopped must not stop this one."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PATIENCE / 1000)
        except OSError:
            # The file system knows none.
            return None


def _tail(file: BinaryIO, length: int) -> bytes:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - length))
    return file.read()
