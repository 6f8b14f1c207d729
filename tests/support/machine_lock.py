"""Lock of the machine: a test that measures time or needs the whole machine runs alone."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class MachineLock:
    """Lock in files of a directory that test processes share. Many tests hold it together, or one holds it alone."""

    def __init__(self, directory: Path) -> None:
        self._gate, self._floor = directory / "gate.lock", directory / "floor.lock"

    @contextlib.contextmanager
    def hold(self, alone: bool) -> Iterator[None]:
        """Hold the lock. A test that needs it alone holds the gate while it waits, so that no other test overtakes."""
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        with _locked(self._gate, fcntl.LOCK_EX) as gate, _locked(self._floor, kind):
            fcntl.flock(gate, fcntl.LOCK_UN)
            yield


@contextlib.contextmanager
def _locked(file: Path, kind: int) -> Iterator[int]:
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
        yield descriptor
    finally:
        os.close(descriptor)
