"""Heartbeats of ranks: each engine of a rank writes a few numbers into its own file in a directory of its agent.

It writes them after each step and before each forward pass, and the agent reads them. Writing takes one system
call on memory, and a failure to write is ignored.
"""

import contextlib
import os
import struct
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

AGENT = "DS_COMPRESS_AGENT"
"""Environment variable of ranks that an agent has started: the directory of their heartbeats."""
RESUME = "DS_COMPRESS_RESUME"
"""Environment variable: "1" makes a program resume from its newest checkpoint."""
MEMORY = "DS_COMPRESS_MEMORY_DIR"
"""Environment variable: a directory in memory that exists as long as the job on this host."""
HOSTS = "DS_COMPRESS_HOSTS"
"""Environment variable: addresses of the hosts, by node rank, as a JSON list."""
_FORMAT = struct.Struct("<dqq")


@dataclass(frozen=True)
class Heartbeat:
    """Heartbeat of one or several engines.

    Attributes:
        time: time of the newest one on the host's monotonic clock, in seconds; 0 if there is none yet.
        steps: optimizer steps of the engine that has made the most.
        saves: True if the rank saves on SIGTERM before it ends.
    """

    time: float
    steps: int
    saves: bool


class HeartbeatWriter:
    """Writer of the heartbeats of one engine of `rank` into a new file in the agent's `directory`."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._steps, self._saves = 0, False
        self._descriptor: int | None = None
        self.problem = ""
        """Why heartbeats cannot be written; empty if they can."""
        try:
            self._descriptor, _ = tempfile.mkstemp(prefix=_prefix(rank), dir=directory)
            # From now on, the file needs no more room.
            os.pwrite(self._descriptor, _FORMAT.pack(0.0, 0, False), 0)
        except OSError as error:
            self.problem = f"{directory}: {error.strerror}"

    def stepped(self, steps: int) -> None:
        """Record that `steps` optimizer steps have been made."""
        self._steps = steps
        self.beat()

    def saves(self, saves: bool) -> None:
        """Record whether this rank saves on SIGTERM from now on."""
        self._saves = saves
        self._write(0.0)

    def beat(self) -> None:
        """Record that this rank is alive."""
        self._write(time.monotonic())

    def _write(self, now: float) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self._descriptor, _FORMAT.pack(now, self._steps, self._saves), 0)

    def close(self) -> None:
        """Withdraw the heartbeat, since silence of this engine no longer means anything, and close the file."""
        self.saves(False)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_heartbeat(directory: Path, rank: int) -> Heartbeat | None:
    """Return the latest heartbeat of all engines of `rank`; None before their first one."""
    return read_latest(directory.glob(f"{_prefix(rank)}*"))


def read_latest(files: Iterable[Path]) -> Heartbeat | None:
    """Return the latest heartbeat in `files`; None without any."""
    found = [_FORMAT.unpack(content) for file in files if len(content := _content(file)) == _FORMAT.size]
    if not found:
        return None
    times, steps, saves = zip(*found, strict=True)
    return Heartbeat(max(times), max(steps), any(saves))


def _content(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def _prefix(rank: int) -> str:
    return f"rank_{rank:05d}_"
