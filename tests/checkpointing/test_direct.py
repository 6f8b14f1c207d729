"""Files that bypass the page cache contain the written bytes, for any size and on any file system."""

import errno
import fcntl
import hashlib
import mmap
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_compress.checkpointing.deepspeed import engine_files
from deepspeed_compress.checkpointing.deepspeed.engine_files import DirectFile

PAGE = mmap.PAGESIZE
BLOCK = 4 * PAGE
"""Size of a buffer, which is small so that files have many."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_files, "_BLOCK", BLOCK)


def write(path: Path, parts: Sequence[Any], rate: float | None = None) -> str:
    with DirectFile(path, rate) as file:
        for part in parts:
            assert file.write(part) == memoryview(part).nbytes
        return file.finish()


def check(path: Path, parts: Sequence[bytes]) -> None:
    digest = write(path, parts)
    assert path.read_bytes() == b"".join(parts)
    assert digest == hashlib.sha256(b"".join(parts)).hexdigest()


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_sizes_that_are_awkward(tmp_path: Path, size: int) -> None:
    check(tmp_path / "file", [random.Random(size).randbytes(size)])


def test_elements_of_several_bytes(tmp_path: Path) -> None:
    write(tmp_path / "file", [memoryview(torch.arange(3000).numpy())])
    assert torch.frombuffer(bytearray((tmp_path / "file").read_bytes()), dtype=torch.int64).equal(torch.arange(3000))


def refuses(original: Callable[..., int], path: Any, flags: int, *more: int) -> int:
    if flags & os.O_DIRECT:
        raise OSError(errno.EINVAL, "no such flag here")
    return original(path, flags, *more)


def wants_a_plain_file(original: Callable[..., int], descriptor: int, data: memoryview) -> int:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
        raise OSError(errno.EINVAL, "larger pages, please")
    return original(descriptor, data)


def takes_a_part(original: Callable[..., int], descriptor: int, data: memoryview) -> int:
    return original(descriptor, data[: max(PAGE, len(data) // 2)])


def takes_little(original: Callable[..., int], descriptor: int, data: memoryview) -> int:
    return original(descriptor, bytes(data[: max(1, len(data) // 3)]))


@pytest.mark.parametrize(
    ("call", "instead"),
    [("open", refuses), ("write", wants_a_plain_file), ("write", takes_a_part)],
)
def test_file_systems_that_do_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, instead: Any) -> None:
    original = getattr(os, call)
    monkeypatch.setattr(engine_files.os, call, lambda *given: instead(original, *given))
    check(tmp_path / "file", [random.Random(1).randbytes(3 * BLOCK + 5)])


def test_a_part_of_a_page_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open without O_DIRECT, which this machine refuses."""
    opened, written = os.open, os.write
    monkeypatch.setattr(engine_files.os, "open", lambda *given: refuses(opened, *given))
    monkeypatch.setattr(engine_files.os, "write", lambda *given: takes_little(written, *given))
    check(tmp_path / "file", [random.Random(1).randbytes(BLOCK + 5)])


def test_a_full_disk_is_an_error_and_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(engine_files.os, "write", full)
    with pytest.raises(OSError, match="no space left"):
        write(tmp_path / "file", [b"x" * 2 * BLOCK])
    assert str(tmp_path / "file") not in map(os.path.realpath, Path("/proc/self/fd").iterdir())


def test_a_rate(tmp_path: Path) -> None:
    begin = time.monotonic()
    write(tmp_path / "file", [bytes(8 * BLOCK)], rate=16 * BLOCK)
    assert time.monotonic() - begin >= 0.5


def test_many_parts(tmp_path: Path) -> None:
    numbers = random.Random(0)
    check(tmp_path / "file", [numbers.randbytes(numbers.choice([0, 1, 7, PAGE, BLOCK, 3 * BLOCK])) for _ in range(60)])


def test_a_file_that_was_longer_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 9 * BLOCK)
    check(tmp_path / "file", [b"short"])
