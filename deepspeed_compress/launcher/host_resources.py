"""Resources of one host for the ranks of a job: a directory, heartbeats, a reserved port, and shared memory."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed_compress.launcher.heartbeat import Heartbeat, read_heartbeat
from deepspeed_compress.safe_files import lock

_SHARED_MEMORY = Path("/dev/shm")
_PREFIX, _UNFINISHED_PREFIX = "ds_compress_", ".ds_compress_"
"""Prefixes of finished directories, and of those under construction, which are never considered abandoned."""
_LOCK = "lock"


@dataclass
class HostStart:
    """Ranks of one start on this host.

    Attributes:
        number: number of the start.
        ranks: the ranks.
        heartbeats: directory of the ranks' heartbeats.
        latest: latest heartbeat of each rank, including ranks that have ended.
        stopping: True once the ranks must end.
        terminating: True once a user's signal has asked the ranks to end.
        kill_at: time at which ranks that still run are killed.
        reported: True once the supervisor has been told that all ranks have ended.
    """

    number: int
    ranks: range
    heartbeats: Path
    latest: dict[int, Heartbeat] = field(default_factory=dict)
    stopping: bool = False
    terminating: bool = False
    kill_at: float | None = None
    reported: bool = False

    @property
    def steps(self) -> int:
        """Return the largest number of steps that a rank has counted."""
        return max((beat.steps for beat in self._read().values()), default=0)

    def silent(self, now: float) -> float | None:
        """Return the seconds since the last heartbeat of any rank; None until each rank has sent one."""
        times = [beat.time for beat in self._read().values() if beat.time]
        return max(0.0, now - max(times)) if times and len(times) == len(self.ranks) else None

    def saving(self) -> list[int]:
        """Return the ranks that save on SIGTERM, for which they would wait for lost ranks."""
        return [rank for rank, beat in self._read().items() if beat.saves]

    def _read(self) -> Mapping[int, Heartbeat]:
        """Return the latest heartbeat of each rank, including ranks that have ended."""
        found = {rank: read_heartbeat(self.heartbeats, rank) for rank in self.ranks}
        self.latest.update({rank: beat for rank, beat in found.items() if beat is not None})
        return self.latest


class ReservedPort:
    """Port of this host that is kept free for a rank."""

    def __init__(self) -> None:
        self._held: socket.socket | None = None

    def reserve(self) -> int:
        """Reserve a free port, and return its number."""
        if self._held is None:
            self._held = socket.socket()
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind(("", 0))
        return int(self._held.getsockname()[1])

    def release(self) -> None:
        """Release the port, so that a rank can listen on it."""
        if self._held is not None:
            self._held.close()
            self._held = None


def remove_shared_memory(rendezvous: Sequence[tuple[str, int]]) -> None:
    """Remove shared memory that DeepSpeed leaves behind. Its name has the address and port of the ranks' rendezvous."""
    for address, port in rendezvous:
        for file in _SHARED_MEMORY.glob(f"deepspeed_*_{address}_{port}_*"):
            with suppress(OSError):
                file.unlink()


@contextmanager
def job_directory() -> Iterator[Path]:
    """Create a directory of a job on a host, in memory, with mode 0700, and remove it at the end.

    Directories that killed agents left behind are removed first.
    """
    base = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    _remove_abandoned(base)
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED_PREFIX, dir=base))
    with (unfinished / _LOCK).open("w") as file:
        lock(file)
        path = unfinished.rename(base / unfinished.name.removeprefix("."))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(base: Path) -> None:
    """Remove directories of dead agents. A living agent holds the lock; without the file, removal has begun already."""
    for path in base.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open("r+") as file:
                if lock(file, waits=False):
                    shutil.rmtree(path, ignore_errors=True)
