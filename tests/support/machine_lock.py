"""Turns of the processes that run tests: a test that measures time, or takes the whole machine, runs alone."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """Locks in files of a directory that the processes share: many tests at a time, or one."""

    def __init__(self, directory: Path) -> None:
        self._gate, self._floor = directory / "gate.lock", directory / "floor.lock"

    @contextlib.contextmanager
    def take(self, alone: bool) -> Iterator[None]:
        """Who wants to be alone holds the gate while others leave, so that nobody overtakes."""
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        with _held(self._gate, fcntl.LOCK_EX) as gate, _held(self._floor, kind):
            fcntl.flock(gate, fcntl.LOCK_UN)
            yield


@contextlib.contextmanager
def _held(file: Path, kind: int) -> Iterator[int]:
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
        yield descriptor
    finally:
        os.close(descriptor)
