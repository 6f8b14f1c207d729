"""Reports of ranks to their agent, in files of a directory of the agent: heartbeats, and the error that ended a rank.

Each engine of a rank writes a few numbers into its own file, after each step and before each forward pass, and the
agent reads them: ranks without a new heartbeat hang. Writing takes one system call on memory, and a failure to write is
ignored.
"""

import json
import os
import struct
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from deepspeed_compress.safe_files import read_text, write_json

AGENT = "DS_COMPRESS_AGENT"
"""Environment variable of ranks that an agent has started: the directory of their heartbeats."""
RESUME = "DS_COMPRESS_RESUME"
"""Environment variable: "1" makes a program resume from its newest checkpoint."""
MEMORY = "DS_COMPRESS_MEMORY_DIR"
"""Environment variable: a directory in memory that exists as long as the job on this host, and that others remove."""
HOSTS = "DS_COMPRESS_HOSTS"
"""Environment variable: addresses of the hosts, by node rank, as a JSON list."""
EXIT_PERMANENT = 78
"""Exit code of a rank whose configuration is invalid, so that no restart can help (EX_CONFIG of sysexits.h)."""
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
            with suppress(OSError):
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
    heartbeats = []
    for file in files:
        with suppress(OSError, struct.error):
            heartbeats.append(_FORMAT.unpack(file.read_bytes()))
    if not heartbeats:
        return None
    times, steps, saves = zip(*heartbeats, strict=True)
    return Heartbeat(max(times), max(steps), any(saves))


def _prefix(rank: int) -> str:
    return f"rank_{rank:05d}_"


@dataclass(frozen=True, order=True)
class RankError:
    """Error that ended a rank, unless the rank had only lost another one.

    Attributes:
        time: time of the error, in seconds since the epoch.
        rank: the rank.
        file: file with the whole traceback; "" if it could not be written.
        lines: the last lines of the traceback.
    """

    time: float
    rank: int
    file: str
    lines: str

    def describe(self) -> str:
        """Return a text that names the rank, and shows the end of the traceback."""
        clock, file = time.strftime("%H:%M:%S", time.localtime(self.time)), self.file and f" (traceback: {self.file})"
        return f"rank {self.rank} failed at {clock}{file}:\n{self.lines}"


def record_error(directory: Path, error: RankError) -> None:
    """Tell the agent, which owns `directory`, why this rank ends."""
    with suppress(OSError):
        write_json(directory / f"error_{error.rank:05d}.json", asdict(error), private=True)


def first_error(directory: Path) -> RankError | None:
    """Return the earliest error of the ranks that an agent has started with `directory`; None without any."""
    errors: list[RankError] = []
    for file in directory.glob("error_*.json"):
        with suppress(OSError, ValueError, TypeError):
            errors.append(RankError(**json.loads(read_text(file))))
    return min(errors, default=None)
