"""Tests of which a default run takes a share a day, and all where a file that they check has changed."""

import subprocess
from datetime import date
from functools import cache
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).parents[2]


def today() -> int:
    return date.today().toordinal()


def is_due(test: str, parts: int, sources: tuple[str, ...], day: int) -> bool:
    """Whether a test, by its id, is in the share of the day, or one of `sources` (files and directories, from the root)
    has changed."""
    return crc32(test.encode()) % parts == day % parts or (bool(sources) and _changed(sources))


@cache
def _changed(sources: tuple[str, ...]) -> bool:
    """In the last commit or since; not where there is no repository."""
    commands = (["diff", "--name-only", "HEAD~1"], ["ls-files", "--others", "--exclude-standard"])
    runs = (
        subprocess.run(["git", *command, "--", *sources], cwd=ROOT, capture_output=True, check=False)
        for command in commands
    )
    return any(run.returncode == 0 and run.stdout for run in runs)
