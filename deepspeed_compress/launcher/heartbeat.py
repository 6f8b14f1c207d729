"""Heartbeats of ranks: each rank writes a few numbers into its own file in a directory of its agent.

The rank writes them after each step and before each forward pass, and the agent reads them. Writing takes one system
call on memory, and a failure to write is ignored.
"""

import contextlib
import os
import struct
import time
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
    """Heartbeat of a rank.

    Attributes:
        time: time on the host's monotonic clock, in seconds; 0 if there is none yet.
        steps: optimizer steps of the engine.
        saves: True if the rank saves on SIGTERM before it ends.
    """

    time: float
    steps: int
    saves: bool


class HeartbeatWriter:
    """Writer of the heartbeats of `rank` into the agent's `directory`."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._steps, self._saves = 0, False
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(_file(directory, rank), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

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
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_heartbeat(directory: Path, rank: int) -> Heartbeat | None:
    """Return the latest heartbeat of `rank`; None before its first one."""
    try:
        now, steps, saves = _FORMAT.unpack(_file(directory, rank).read_bytes())
    except (OSError, struct.error):
        return None
    return Heartbeat(now, steps, bool(saves))


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}"
