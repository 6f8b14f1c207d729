"""The files of a run in `monitor.path`: lines of figures, its configuration, and its decisions with their reasons.

Every line names its run, and a failing write never stops training. Files are private to their user.
"""

import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from deepspeed_compress.config import masked
from deepspeed_compress.config.islands import island_directory
from deepspeed_compress.config.numbers import finite
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.safe_files import lock

STATISTICS = "compression.jsonl"
EVENTS = "events.jsonl"
CONFIGURATION = "ds_config.json"
TAIL_BYTES = 1 << 16
"""Number of bytes at the end of a file that are searched for the end of a line."""
PATIENCE = 2.0
"""Seconds to wait for another job that is writing a line, which usually takes microseconds."""


@dataclass(frozen=True)
class Part:
    """The part of a run that a line belongs to.

    Attributes:
        id: id of the run; a resumed run keeps it.
        started: start time (UTC) of the process, or of the first process of its job.
        since: the optimizer step from which this process, or a checkpoint loaded in it, continued. Lines of other
            processes about later steps are abandoned.
    """

    id: str
    started: str
    since: int


class Journal:
    """Writes the files of a run into `directory`; without a directory it does nothing.

    If a file cannot be written, a CompressWarning says so once per process, and the next line tries again: monitoring
    must never stop training.
    """

    def __init__(self, directory: str | None, run: str = "", step: int = 0, started: str | None = None) -> None:
        self.part = Part(run, started or utc_now(), step)
        self._directory = None if directory is None else Path(directory)
        self._warned: set[str] = set()

    @property
    def active(self) -> bool:
        return self._directory is not None

    def add(self, name: str, fields: Mapping[str, Any]) -> None:
        """Append a line with `fields` to the file `name`."""
        line = json.dumps({**fields, "run": asdict(self.part)}) + "\n"
        self._try(name, lambda file: _append(file, line.encode()))

    def write_configuration(self, ds_config: Mapping[str, Any]) -> None:
        """Write the configuration of the run next to its statistics, with passwords and keys masked."""
        text = json.dumps(masked(ds_config), indent=2, default=str) + "\n"

        def write(path: Path) -> None:
            with open(path, "w", encoding="utf-8", opener=open_private) as file:
                file.write(text)

        self._try(CONFIGURATION, write)

    def adopt(self, run: str | None) -> None:
        """Continue the run that saved a checkpoint; None continues the last run of the directory."""
        found = self._last() if run is None else run
        self.part = replace(self.part, id=found or self.part.id)

    def continue_from(self, step: int) -> None:
        """Declare that the following lines continue from optimizer step `step`."""
        self.part = replace(self.part, since=step)

    def _last(self) -> str | None:
        if self._directory is None:
            return None
        try:
            with open(self._directory / STATISTICS, "rb", opener=open_private) as file:
                # The last line may be incomplete.
                found: str = json.loads(_tail(file, TAIL_BYTES).rpartition(b"\n")[0].splitlines()[-1])["run"]["id"]
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
        """Warn, once per `kind`, that a part of the run is not recorded."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{what}; training continues, but these lines are lost", CompressWarning, stacklevel=2)


def utc_now() -> str:
    """Return the time in UTC, in ISO format with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _append(path: Path, line: bytes) -> None:
    with open(path, "a+b", opener=open_private) as file:
        # Without the lock, a line that another job is writing would look like a truncated one. Closing unlocks.
        _lock(file)
        if _tail(file, 1) not in (b"", b"\n"):
            # Remove a line that a crash or a full disk has truncated: a line is complete or absent.
            rest = len(_tail(file, TAIL_BYTES).rpartition(b"\n")[2])
            file.truncate(file.seek(0, os.SEEK_END) - rest)
        file.write(line)


def _lock(file: BinaryIO) -> None:
    """Lock `file`.

    Raises:
        BlockingIOError: another job has held the lock for `PATIENCE` seconds; a suspended job must not block this one.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            lock(file, waits=False)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PATIENCE / 1000)


def _tail(file: BinaryIO, length: int) -> bytes:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - length))
    return file.read()


def open_private(path: str, flags: int) -> int:
    """Open `path` as an `opener` for `open`: a new file is private to its user, an existing one keeps its mode.

    Raises:
        OSError: the file cannot be opened; also for a pipe without a reader, on which a write would block.
    """
    return os.open(path, flags | os.O_NONBLOCK, 0o600)


def make_private(directory: Path) -> None:
    """Make `directory` and its missing parents, private to the user."""
    for missing in reversed([one for one in (directory, *directory.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


@dataclass(frozen=True)
class Event:
    """A decision of the schedule, the guard, the adaptive policy or `auto`.

    Attributes:
        step: optimizer steps done.
        kind: "schedule", "anomaly", "return", "full_sync", "residuals_cleared", "rollback", "checkpoint_rollback",
            "adapt", "auto", or "crossover_tensor" (pipeline, experts, sequence).
        reason: the reason, for people.
        evidence: the figures that led to the decision.
        before: settings of gradients before, in short form.
        after: settings of gradients after; equal to `before` if nothing changed.
        dry_run: True if the decision did not take effect.
    """

    step: int
    kind: str
    reason: str
    evidence: Mapping[str, float]
    before: str
    after: str
    dry_run: bool = False

    def __str__(self) -> str:
        change = f": {self.before} -> {self.after}" if self.before != self.after else ""
        return f"step {self.step}: {self.kind}{' (dry run)' if self.dry_run else ''}: {self.reason}{change}"


class EventLog:
    """List of the `events` of this process. One rank also appends them to events.jsonl and to Python's log.

    Args:
        journal: the files of the run.
        writes: True if this rank writes.
        island: number of the island, which has its own file; None without islands or if all islands decide together.
    """

    def __init__(self, journal: Journal, writes: bool, island: int | None = None) -> None:
        self._journal, self._writes, self._island = journal, writes, island
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)
        if not self._writes:
            return
        level = logging.WARNING if event.evidence else logging.INFO
        prefix = "" if self._island is None else f"island {self._island}: "
        logging.getLogger("deepspeed_compress").log(level, "%s%s", prefix, event)
        island = {} if self._island is None else {"island": self._island}
        file = Path(island_directory(self._island or 0), EVENTS)
        self._journal.add(str(file), {**finite(asdict(event)), **island})
