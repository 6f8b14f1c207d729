"""The C++ kernels as a shared library, built for this processor on first use and then cached.

The library is built by torch.utils.cpp_extension.load, which also builds DeepSpeed's ops. Each build uses its own
directory, and the finished library is renamed into the cache, so a killed build leaves neither a lock that others wait
for nor a partial file.
"""

import ctypes
import hashlib
import os
import platform
import tempfile
from pathlib import Path

import torch

from deepspeed_compress.safe_files import locked

MARCH = "DS_COMPRESS_MARCH"
"""Environment variable with the instruction set of the kernels (the compiler's `-march`). Default: this processor's."""

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

    It is stored where DeepSpeed's ops are too: under `TORCH_EXTENSIONS_DIR`, by default ~/.cache/torch_extensions.

    Raises:
        RuntimeError, OSError: the library cannot be built. The message is the compiler's.
    """
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    directory = Path(named).resolve() if named else Path.home() / ".cache" / "torch_extensions"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"deepspeed_compress_{_fingerprint()}.so"
    if not path.exists():
        path.with_suffix(".lock").touch()
        with locked(path.with_suffix(".lock")):
            if not path.exists():
                _build(path)
    return ctypes.CDLL(str(path))


def instruction_set(library: ctypes.CDLL) -> str:
    """Return the name of the vector instructions that `library` is compiled for, such as "AVX2"."""
    function = library.compress_instruction_set
    function.argtypes, function.restype = [], ctypes.c_char_p
    return str(function().decode())


def _flags() -> list[str]:
    """Return the compiler's options."""
    return [*FLAGS, f"-march={os.environ.get(MARCH) or 'native'}"]


def _fingerprint() -> str:
    """Return a hash of everything that the library depends on; machines of several kinds may share a home."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else [platform.processor()]
    features = next((line for line in lines if line.startswith(("flags", "Features"))), lines[0])
    parts = [*_flags(), os.environ.get("CXX", ""), torch.__version__, platform.machine(), features]
    texts = (file.read_text() for file in (*SOURCES, *_HEADERS))
    return hashlib.sha256("\0".join([*parts, *texts]).encode()).hexdigest()[:16]


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
        built.chmod(0o755)  # whatever the umask, no other user may change what is loaded
        os.replace(built, path)
