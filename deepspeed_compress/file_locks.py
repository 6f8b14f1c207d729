"""Locks of files and directories between processes. The kernel releases them when their process ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from deepspeed_compress.safe_files import open_own

LOCK = ".deepspeed_compress.lock"
"""File that `hold` locks in a directory."""


def lock(file: int | IO[Any], *, shared: bool = False, waits: bool = True) -> bool:
    """Lock an open file or directory until it is closed, by this process and those that it forks meanwhile.

    Returns:
        False on a file system without locks, where no process is excluded.

    Raises:
        BlockingIOError: another process holds the lock, and this one does not wait.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Exclude other processes that use this function for `path`, an existing file or directory. Waits for its turn."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def hold(directory: Path, name: str = LOCK) -> TextIO | None:
    """Lock the file `name` in `directory`, which is created if needed, until the returned file is closed.

    Returns None if another process holds the lock. The locks are POSIX locks, which belong to the process: a forked
    child that outlives it does not hold them, and the same process may lock a file twice, until it closes one of
    the files. On a file system without locks, no process is excluded.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / name, "w", opener=open_own)  # noqa: SIM115  (held by the caller)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        return None
    except OSError:
        pass
    return file
