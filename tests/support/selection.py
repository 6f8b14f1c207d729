"""Choices that a commit makes for its run: the share of the slow tests, and the processor whose rounding is used."""

import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).parents[2]
PROCESSORS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "DS_COMPRESS_MARCH": "x86-64-v3"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
}
"""Environment under which torch and our kernels compute as on another processor, whose rounding differs."""


def head() -> str:
    """Return the hash of the commit that is checked out; "0" outside a repository, or without git."""
    return _git("rev-parse", "HEAD").strip() or "0"


def _git(*arguments: str) -> str:
    """Return what git prints; "" if it fails or is not installed."""
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return run.stdout if run.returncode == 0 else ""


def processor_of(asked: str, features: Iterable[str]) -> str:
    """Return a name of `PROCESSORS`: the requested one, or the one that belongs to a commit.

    Args:
        asked: a name, or the hash of a commit, which always gives the same name.
        features: names of the features of this machine's processor.

    Raises:
        ValueError: this machine cannot compute as the requested processor, or there is none of this name.
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


def in_share(test: str, parts: int, share: int) -> bool:
    """Return True if the test with this id belongs to share number `share` of `parts` equal ones."""
    return crc32(test.encode()) % parts == share % parts


def changed(sources: Iterable[str]) -> bool:
    """Return True if one of `sources` has changed in the last commit or since. False outside a repository.

    Args:
        sources: files and directories, relative to the root of the repository.
    """
    return any(file == source or file.startswith(f"{source}/") for source in sources for file in _changed_files())


@cache
def _changed_files() -> list[str]:
    """Return the files that have changed in the last commit or since, relative to the root of the repository."""
    commands = (["diff", "--name-only", "--relative", "HEAD~1"], ["ls-files", "--others", "--exclude-standard"])
    return [line for command in commands for line in _git(*command).splitlines()]
