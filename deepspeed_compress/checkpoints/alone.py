"""One job at a time in a directory: locks that the kernel lifts when their process ends, however it ends."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

__all__ = ["LOCK", "hold", "in_turn"]

LOCK = ".deepspeed_compress.lock"


def hold(directory: Path) -> TextIO | None:
    """The lock of `directory`, which is made, for as long as the file that is returned is open; None where another
    process has it.

    Locks of POSIX, which belong to the process: one that it forks, and that outlives it, does not have them; and the
    same process may hold a directory twice, until it closes one of the files. Where the file system knows no locks,
    nobody is kept out.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / LOCK, "w", opener=_private)  # noqa: SIM115  (held by who called)
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
    """Between others that do the same in `directory`, which is there; they are waited for, where the file system knows
    locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)
