"""Opening the files of a run: they are private to their user, and a pipe in their place does not block."""

import os
from pathlib import Path


def open_private(path: str, flags: int) -> int:
    """Open `path` as an `opener` for `open`: a new file is private to its user, an existing one keeps its mode.

    Raises:
        OSError: the file cannot be opened; also for a pipe without a reader, on which a write would block.
    """
    return os.open(path, flags | os.O_NONBLOCK, 0o600)


def make_private(directory: Path) -> None:
    """Make `directory` and its missing parents, private to the user."""
    for missing in reversed([one for one in (directory, *directory.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
