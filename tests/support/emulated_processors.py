"""The processor whose instructions and rounding the tests use."""

import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

PROCESSORS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "DS_COMPRESS_MARCH": "x86-64-v3"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
}
"""Environment under which torch and our kernels compute as on another processor, whose rounding differs."""


def processor_of(asked: str, features: Iterable[str]) -> str:
    """Return the requested name of `PROCESSORS`.

    Args:
        asked: a name.
        features: names of the features of this machine's processor.

    Raises:
        ValueError: this machine cannot compute as the requested processor, or there is none of this name.
    """
    usable = [name for name in PROCESSORS if name != "avx2" or "avx2" in features]
    if asked not in usable:
        raise ValueError(f"{asked!r} is none of {usable}, which this machine can run")
    return asked


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
