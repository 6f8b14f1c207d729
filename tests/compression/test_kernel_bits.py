"""The C++ kernels give the same bits, whatever instructions they are compiled for.

`kernel_bits.cpp` runs every kernel and prints digests of the results. It is compiled for several processors. A program
for aarch64 runs in QEMU.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from deepspeed_compress.compression.kernels.compiled import FLAGS, SOURCES

PROGRAM = Path(__file__).with_name("kernel_bits.cpp")
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
NEEDED = {"x86-64": "fpu", "x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}
"""A feature, as Linux names it, that a processor needs for each instruction set."""

pytestmark = [
    pytest.mark.slow,  # each build takes seconds of a core
    pytest.mark.skipif(
        platform.system() != "Linux" or shutil.which(os.environ.get("CXX", "g++")) is None,
        reason="needs g++ or $CXX on Linux",
    ),
]


def digests(directory: Path, compiler: str, options: Sequence[str], emulator: Sequence[str] = ()) -> list[str]:
    """Return the lines that the program prints if it is compiled with `options`."""
    program = directory / "kernel_bits"
    sources = [str(source) for source in (*SOURCES, PROGRAM)]
    subprocess.run([compiler, *FLAGS, *options, *sources, "-o", str(program)], check=True, capture_output=True)
    run = subprocess.run([*emulator, str(program)], check=True, capture_output=True, text=True)
    return run.stdout.splitlines()


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of a build for this processor."""
    return digests(tmp_path_factory.mktemp("native"), os.environ.get("CXX", "g++"), ["-march=native"])


@pytest.mark.parametrize("march", NEEDED)
def test_instruction_sets_give_the_same_bits(march: str, native: list[str], tmp_path: Path) -> None:
    if platform.machine() != "x86_64" or NEEDED[march] not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor has no {march}")
    assert len(native) > 400
    assert digests(tmp_path, os.environ.get("CXX", "g++"), [f"-march={march}"]) == native


@pytest.mark.skipif(
    shutil.which(CROSS_COMPILER) is None or shutil.which(EMULATOR) is None,
    reason=f"needs {CROSS_COMPILER} and {EMULATOR}: apt-get install g++-aarch64-linux-gnu qemu-user-static",
)
def test_arm_gives_the_same_bits(native: list[str], tmp_path: Path) -> None:
    assert digests(tmp_path, CROSS_COMPILER, ["-static"], [EMULATOR]) == native


@pytest.mark.skipif(shutil.which("clang++-14") is None and shutil.which("clang++") is None, reason="needs clang++")
def test_clang_gives_the_same_bits(native: list[str], tmp_path: Path) -> None:
    compiler = "clang++" if shutil.which("clang++") else "clang++-14"
    assert digests(tmp_path, compiler, ["-march=native"]) == native
