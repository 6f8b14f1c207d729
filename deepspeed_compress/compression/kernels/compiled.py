"""The C++ kernels as a shared library: built on first use for this very processor, and kept.

Source of the way: torch.utils.cpp_extension.load, which DeepSpeed builds its ops with. It builds in a directory of its
own here, and the finished library is renamed into the cache: a build that is killed leaves neither a lock that others
wait for, nor half a file.
"""

import ctypes
import fcntl
import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["MARCH", "load_library"]

MARCH = "DS_COMPRESS_MARCH"
"""Environment variable: the instruction set that the kernels are built for (`-march` of the compiler), by default that
of this processor."""
_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_FLAGS = (
    *("-O3", "-fopenmp", "-std=c++17"),
    # The bits of the reference: no fused multiply-add where it has two roundings.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)


def load_library() -> ctypes.CDLL:
    """The library, from the cache or built now (a few seconds; processes of one machine wait for each other).

    It lies under `TORCH_EXTENSIONS_DIR`, by default ~/.cache/torch_extensions. Raises RuntimeError or OSError, whose
    message is that of the compiler, when it cannot be built.
    """
    path = _cache_path()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path.with_suffix(".lock")):
            if not path.exists():
                _build(path)
    return ctypes.CDLL(str(path))


def _flags() -> list[str]:
    """Return the compiler's options."""
    return [*_FLAGS, f"-march={os.environ.get(MARCH) or 'native'}"]


def _cache_path() -> Path:
    default = Path.home() / ".cache" / "torch_extensions"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default) / f"deepspeed_compress_{_fingerprint()}.so"


def _fingerprint() -> str:
    """Of everything that the library depends on: a home directory may be shared by machines of several kinds."""
    parts = [*_flags(), os.environ.get("CXX", ""), torch.__version__, platform.machine(), _processor_features()]
    texts = (file.read_text() for file in (*_SOURCES, *_HEADERS))
    return hashlib.sha256("\0".join([*parts, *texts]).encode()).hexdigest()[:16]


def _processor_features() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; the kernel lifts the lock when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(path: Path) -> None:
    from torch.utils import cpp_extension  # takes a while to import

    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        cpp_extension.load(
            "deepspeed_compress_kernels",
            [str(source) for source in _SOURCES],
            extra_cflags=_flags(),
            extra_ldflags=["-fopenmp"],
            build_directory=directory,
            is_python_module=False,
        )
        os.replace(Path(directory) / "deepspeed_compress_kernels.so", path)
