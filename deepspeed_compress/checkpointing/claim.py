"""Restriction of changes in a directory of checkpoints to the newest start of a job.

Writer processes outlive their ranks, possibly for long on a busy machine because of their low priority. Their remaining
work must not interfere with the files of the ranks that follow, which save the same tags again.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.errors import StateError
from deepspeed_compress.file_locks import lock

_FILE = ".deepspeed_compress_start"
_LENGTH = 32


def this_start() -> str:
    """Return a name that is unique to this process on all machines. A start of a job is named by its first rank."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    # The fields after the name of the program, which may contain anything. The 22nd field is the start time.
    begun = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return hashlib.sha256(f"{machine} {os.getpid()} {begun}".encode()).hexdigest()[:_LENGTH]


@dataclass(frozen=True)
class Claim:
    """Claim of the start `start` on the directory `place`. Without any claim, no process is excluded."""

    place: Path
    start: str

    def take(self) -> None:
        """Take over the directory. Afterwards, no process of another start changes anything.

        Raises:
            OSError: the directory cannot be written.
        """
        descriptor = os.open(self.place / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if not self._is_ours(descriptor):
                os.pwrite(descriptor, self.start.encode(), 0)
                # Other processes notice it at their next file. Wait for those that are about to rename one.
                lock(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the claim while files are renamed or removed.

        Raises:
            StateError: a later start has taken the directory.
        """
        try:
            descriptor = os.open(self.place / _FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            # The directory was removed meanwhile, or is a different one on this host.
            yield
            return
        try:
            lock(descriptor, shared=True)
            if not self._is_ours(descriptor):
                raise StateError(
                    f"{self.place}: another start of the job has claimed it: a later one, or an earlier one if this "
                    "one could not write there"
                )
            yield
        finally:
            os.close(descriptor)

    def check(self) -> None:
        """Check that the claim still holds.

        Raises:
            StateError: a later start has taken the directory.
        """
        with self.held():
            pass

    def _is_ours(self, descriptor: int) -> bool:
        return os.pread(descriptor, _LENGTH, 0) == self.start.encode()
