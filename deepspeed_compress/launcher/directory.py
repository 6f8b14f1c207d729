"""Directory of a job on a host. It is in memory, readable only by its user, and removed when the job ends."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_SHARED = Path("/dev/shm")
_PREFIX, _UNFINISHED_PREFIX = "ds_compress_", ".ds_compress_"
"""Prefixes of finished directories, and of those under construction, which are never considered abandoned."""
_LOCK = "lock"


class JobDirectory:
    """Directory `path`, with mode 0700. Its subdirectory `memory` survives restarts, until the job ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory = path / "memory"
        self.memory.mkdir(mode=0o700)

    def heartbeats(self, start: int) -> Path:
        """Create and return the directory for the heartbeats of the ranks of a start."""
        directory = self.path / f"heartbeats_{start}"
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory


@contextlib.contextmanager
def job_directory() -> Iterator[JobDirectory]:
    """Create a job directory, and remove it at the end.

    Directories that killed agents left behind are removed first.
    """
    base = _SHARED if _SHARED.is_dir() and os.access(_SHARED, os.W_OK) else Path(tempfile.gettempdir())
    _remove_abandoned(base)
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED_PREFIX, dir=base))
    with (unfinished / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = unfinished.rename(base / unfinished.name.removeprefix("."))
        try:
            yield JobDirectory(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(base: Path) -> None:
    """Remove directories of dead agents. A living agent holds the lock; without the file, removal has begun already."""
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
