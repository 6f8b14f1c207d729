"""Which start of a job may change a directory of checkpoints: the newest.

Processes that write outlive their ranks, and with the lowest priority on a busy machine they may do so for long. What
they have left to do must not get between the files of the ranks that follow, which save the same tags again.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.errors import StateError

__all__ = ["Claim", "this_start"]

_FILE = ".deepspeed_compress_start"
_LENGTH = 32


def this_start() -> str:
    """A name that no other process has had on any machine: a start of a job is named by its first rank."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    # What follows the name of the program, in which anything may stand; the 22nd field is when it began.
    begun = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return hashlib.sha256(f"{machine} {os.getpid()} {begun}".encode()).hexdigest()[:_LENGTH]


@dataclass(frozen=True)
class Claim:
    """Of the start `start` on the directory `place`. Whoever has made no claim there keeps nobody out."""

    place: Path
    start: str

    def take(self) -> None:
        """When this has returned, nobody of another start changes anything. OSError where nothing can be written."""
        descriptor = os.open(self.place / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not self._is_ours(descriptor):
                os.pwrite(descriptor, self.start.encode(), 0)
                # Others see it with their next file. Whoever is about to rename one is waited for.
                _lock(descriptor, fcntl.LOCK_EX)
        finally:
            os.close(descriptor)

    @contextmanager
    def held(self) -> Iterator[None]:
        """For as long as files are renamed or removed. StateError where a later start has taken the directory."""
        try:
            descriptor = os.open(self.place / _FILE, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            # The directory was removed since, or this host has another one.
            yield
            return
        try:
            _lock(descriptor, fcntl.LOCK_SH)
            if not self._is_ours(descriptor):
                raise StateError(f"{self.place}: ranks that were started later save there now")
            yield
        finally:
            os.close(descriptor)

    def check(self) -> None:
        """StateError where a later start has taken the directory."""
        with self.held():
            pass

    def _is_ours(self, descriptor: int) -> bool:
        return os.pread(descriptor, _LENGTH, 0) == self.start.encode()


def _lock(descriptor: int, kind: int) -> None:
    """Where the file system knows no locks, what was checked may be old by one file."""
    with suppress(OSError):
        fcntl.flock(descriptor, kind)
