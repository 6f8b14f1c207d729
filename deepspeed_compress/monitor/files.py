"""Files of a run: what they hold is their user's business, and whatever stands in their place holds nobody up."""

import os
from pathlib import Path

__all__ = ["make_private", "open_private"]


def open_private(path: str, flags: int) -> int:
    """An `opener`: what it makes may be read by its user alone; what is there stays as it is.

    A pipe that nobody reads is an OSError, and does not make who writes wait.
    """
    return os.open(path, flags | os.O_NONBLOCK, 0o600)


def make_private(directory: Path) -> None:
    """Make `directory` and those above it that are missing, for its user alone."""
    for missing in reversed([one for one in (directory, *directory.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
