"""The C++ kernels as a shared library, built for this processor on first use and then cached.

The library is built by torch.utils.cpp_extension.load, which also builds DeepSpeed's ops. Each build uses its own
directory, and the finished library is renamed into the cache, so a killed build leaves neither a lock that others wait
for nor a partial file.
"""

import ctypes
import hashlib
import os
import platform
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.safe_files import locked

MARCH = "DS_COMPRESS_MARCH"
"""Environment variable with the instruction set of the kernels (the compiler's `-march`). Default: this processor's."""
_FAST = ("AVX2", "AVX-512", "NEON", "SVE")
"""Instruction sets with which no kernel is slow. Earlier ones of x86-64 have no fused multiply-add."""
_EXTENSIONS = "TORCH_EXTENSIONS_DIR"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
"""The C++ files, which do not depend on torch."""
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
FLAGS = (
    *("-O3", "-fopenmp", "-std=c++17"),
    # Match the bits of the reference, which rounds products and sums separately: no fused multiply-add.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
"""Options of the compiler on every processor."""


def load_library() -> ctypes.CDLL:
    """Return the library from the cache, or build it now (a few seconds; processes of one machine wait for each other).

    It is stored under `TORCH_EXTENSIONS_DIR`, by default ~/.cache/torch_extensions. A library runs with this user's
    rights, so a directory that other users can write is replaced by a private one, with a warning.

    Raises:
        RuntimeError, OSError: the library cannot be built. The message is the compiler's.
    """
    path = _directory() / _library_name()
    if not _is_trusted(path):
        path.with_suffix(".lock").touch()
        with locked(path.with_suffix(".lock")):
            if not _is_trusted(path):
                _build(path)
    return ctypes.CDLL(str(path))


def instruction_set(library: ctypes.CDLL) -> str:
    """Return the name of the vector instructions that `library` is compiled for, such as "AVX2"."""
    function = library.compress_instruction_set
    function.argtypes, function.restype = [], ctypes.c_char_p
    return str(function().decode())


def warn_if_slow(library: ctypes.CDLL) -> None:
    """Warn if `library` uses slow instructions."""
    name = instruction_set(library)
    if name in _FAST:
        return
    chosen = os.environ.get(MARCH)
    reason = f"{MARCH}={chosen} chooses that; unset it" if chosen else "this processor, or the compiler, has no AVX2"
    warnings.warn(
        f"compression runs with {name} instructions, several times slower than with AVX2: {reason}",
        CompressWarning,
        stacklevel=2,
    )


def _directory() -> Path:
    """Return the first usable directory for the library. Warn if that is not the one that the environment names."""
    candidates = list(_candidates())
    chosen = next(filter(_is_usable, candidates), None)
    if chosen is None:
        raise OSError(
            "found no directory for compiled kernels that only this user can write, tried "
            f"{', '.join(map(str, candidates))}"
        )
    named = os.environ.get(_EXTENSIONS)
    if named and chosen != candidates[0] and os.environ.get("LOCAL_RANK", "0") == "0":
        warnings.warn(_refusal(Path(named), chosen), CompressWarning, stacklevel=2)
    return chosen


def _candidates() -> Iterator[Path]:
    """Yield the directory that the environment names, or torch's default, followed by private ones."""
    named = os.environ.get(_EXTENSIONS)
    if named:
        yield Path(named).resolve()
    with suppress(RuntimeError):  # a user without a home directory
        cache = Path.home() / ".cache"
        yield from () if named else (cache / "torch_extensions",)
        yield cache / "deepspeed_compress"
    yield Path(tempfile.gettempdir()).resolve() / f"deepspeed_compress_kernels_{os.geteuid()}"


def _is_usable(directory: Path) -> bool:
    """Return True if the library can be loaded from `directory` or built there. Creates `directory`."""
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError:
        return False
    return _is_trusted(directory) and (_is_trusted(directory / _library_name()) or os.access(directory, os.W_OK))


def _is_trusted(path: Path) -> bool:
    """Return True if `path` exists and only this user and root can change it."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & _WRITABLE_BY_OTHERS


def _refusal(named: Path, chosen: Path) -> str:
    """Return a warning that says why no library is loaded from the directory `named`, and what to do."""
    try:
        found = named.stat()
        state = f"owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}"
    except OSError as error:
        state = str(error)
    return (
        f"{_EXTENSIONS}={named}: compression kernels are not loaded from this directory ({state}; allowed: a directory "
        f"that only this user or root can write), but from {chosen}. Run chmod go-w {named}, or set {_EXTENSIONS} to a "
        "directory of your own"
    )


def _library_name() -> str:
    return f"deepspeed_compress_{_fingerprint()}.so"


def _flags() -> list[str]:
    """Return the compiler's options."""
    return [*FLAGS, f"-march={os.environ.get(MARCH) or 'native'}"]


def _fingerprint() -> str:
    """Return a hash of everything that the library depends on; machines of several kinds may share a home."""
    parts = [*_flags(), os.environ.get("CXX", ""), torch.__version__, platform.machine(), _processor_features()]
    texts = (file.read_text() for file in (*SOURCES, *_HEADERS))
    return hashlib.sha256("\0".join([*parts, *texts]).encode()).hexdigest()[:16]


def _processor_features() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])


def _build(path: Path) -> None:
    from torch.utils import cpp_extension  # takes a while to import

    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        cpp_extension.load(
            "deepspeed_compress_kernels",
            [str(source) for source in SOURCES],
            extra_cflags=_flags(),
            extra_ldflags=["-fopenmp"],
            build_directory=directory,
            is_python_module=False,
        )
        built = Path(directory) / "deepspeed_compress_kernels.so"
        built.chmod(0o755)
        os.replace(built, path)
