"""The directory of a job on a host: in memory, for its user alone, there until the job has ended."""

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
"""Of directories, and of those that are being made, which nobody takes for abandoned."""
_LOCK = "lock"


class JobDirectory:
    """`path` has mode 0700. `memory` outlives starts: nothing of it is removed before the job ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory = path / "memory"
        self.memory.mkdir(mode=0o700)

    def signs(self, start: int) -> Path:
        """For the signs of life of the ranks of a start, made anew."""
        place = self.path / f"signs_{start}"
        place.mkdir(mode=0o700, exist_ok=True)
        return place


@contextlib.contextmanager
def job_directory() -> Iterator[JobDirectory]:
    """A new one, which is removed at the end. What an agent that was killed has left is removed before."""
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
    """Whoever lives holds a lock; without the file a directory is being removed."""
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            with (path / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
