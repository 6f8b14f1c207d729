"""Exclusive use of a directory by one job, with locks that the kernel releases whenever their process ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from deepspeed_compress.safe_files import open_own

LOCK = ".deepspeed_compress.lock"


def hold(directory: Path) -> TextIO | None:
    """Lock `directory`, which is created if needed, until the returned file is closed.

    Returns None if another process holds the lock. The locks are POSIX locks, which belong to the process: a forked
    child that outlives it does not hold them, and the same process may lock a directory twice, until it closes one of
    the files. On a file system without locks, no process is excluded.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / LOCK, "w", opener=open_own)  # noqa: SIM115  (held by the caller)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        return None
    except OSError:
        pass
    return file


@contextmanager
def in_turn(directory: Path) -> Iterator[None]:
    """Exclude other processes that use this function for `directory`, which must exist.

    Waits for its turn. On a file system without locks, no process is excluded.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
