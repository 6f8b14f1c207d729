"""What changes from run to run: which of the rotating tests run, by the day, and as which processor, by the commit."""

import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from datetime import date
from functools import cache
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).parents[2]
PROCESSORS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "DS_COMPRESS_MARCH": "x86-64-v3"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
}
"""Environment under which torch and our kernels compute as on another processor, whose rounding is another one."""


def today() -> int:
    return date.today().toordinal()


def processor_of(asked: str, features: Iterable[str]) -> str:
    """Return a name of `PROCESSORS`: the one that is asked for, or the one whose turn it is at a commit.

    Args:
        asked: A name, or the hash of a commit, for which the same name is returned each time.
        features: Names of the features of this machine's processor.

    Raises:
        ValueError: This machine cannot compute as the processor that is asked for, or there is none of this name.
    """
    usable = [name for name in PROCESSORS if name != "avx2" or "avx2" in features]
    if asked in usable:
        return asked
    try:
        return usable[int(asked, 16) % len(usable)]
    except ValueError:
        raise ValueError(f"{asked!r} is neither of {usable}, which this machine can run, nor a commit") from None


def environment_of(processor: str) -> dict[str, str]:
    """Return what to set to compute as one of `PROCESSORS`.

    Each has a cache of its own for what torch compiles: torch looks code up without regard to the instruction set that
    it was generated for. It cannot build the code of another one, and code that was built for another one crashes.
    """
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{processor}"
    return {**PROCESSORS[processor], "TORCHINDUCTOR_CACHE_DIR": str(cache)}


def processor_features() -> list[str]:
    """Return the features of this machine's processor, as Linux names them on x86-64."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        return []
    return next(line.split() for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))


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
