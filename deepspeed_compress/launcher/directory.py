"""Directory of a job on a host: in memory, for its user alone, and removed when the job ends."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["JobDirectory", "job_directory"]

_SHARED = Path("/dev/shm")
_PREFIX, _MADE = "ds_compress_", ".ds_compress_"
"""Prefixes of directories, and of those under construction, which are never taken for abandoned."""
_LOCK = "lock"


class JobDirectory:
    """Directory `path`, with mode 0700. `memory` outlives starts: it is kept until the job ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory = path / "memory"
        self.memory.mkdir(mode=0o700)

    def signs(self, start: int) -> Path:
        """Create and return the directory for the signs of life of the ranks of a start."""
        place = self.path / f"signs_{start}"
        place.mkdir(mode=0o700, exist_ok=True)
        return place


@contextlib.contextmanager
def job_directory() -> Iterator[JobDirectory]:
    """Create a job directory, which is removed at the end.

    Directories that killed agents left behind are removed first.
    """
    base = _SHARED if _SHARED.is_dir() and os.access(_SHARED, os.W_OK) else Path(tempfile.gettempdir())
    _remove_abandoned(base)
    made = Path(tempfile.mkdtemp(prefix=_MADE, dir=base))
    with (made / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = made.rename(base / made.name.removeprefix("."))
        try:
            yield JobDirectory(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _remove_abandoned(base: Path) -> None:
    """Remove directories of dead agents. A living one holds a lock; a directory without the file is being removed."""
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
