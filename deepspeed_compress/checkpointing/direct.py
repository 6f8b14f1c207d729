"""Writing of checkpoint files past the page cache. They are hashed while they are written, and then renamed.

The processors that train would also have to allocate, fill and write back pages of the cache. Past the cache (open(2),
O_DIRECT), the disk reads the data itself, and hashing each block before it is written avoids reading the file again.
File systems without support for this are written through the cache.
"""

import errno
import fcntl
import hashlib
import io
import mmap
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from glob import escape
from pathlib import Path
from typing import IO, Any, cast

import torch

from deepspeed_compress.safe_files import temporary

_BLOCK = 1 << 20
"""Number of bytes written at a time. They fit into a processor's cache between their copy and their digest."""


def write_torch(
    state: Any, path: Path, max_rate: float | None, held: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Mapping[Path, str]:
    """Write `state` to `path` by `torch.save`, and return the SHA-256 of the file.

    It is written under a temporary name, which is renamed while `held()` is entered, at no more than `max_rate` bytes
    per second. Removes what writers that were killed have left of the same file.
    """
    for left in path.parent.glob(f"{escape(path.name)}.*.tmp"):
        left.unlink(missing_ok=True)
    scratch = temporary(path)
    try:
        with DirectFile(scratch, max_rate) as stream:
            torch.save(state, cast(IO[bytes], stream))
            sha256 = stream.finish()
        with held():
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return {path: sha256}


class DirectFile(io.RawIOBase):
    """A new file at `path`, written sequentially. Raises OSError as `open` and `os.write` do.

    Args:
        path: path of the file, which is replaced.
        max_rate: bytes per second; None for no limit.
    """

    def __init__(self, path: Path, max_rate: float | None = None) -> None:
        super().__init__()
        self._descriptor = _opened(path)
        # Whole pages, page-aligned, as O_DIRECT requires.
        self._block = mmap.mmap(-1, _BLOCK)
        self._filled = self._written = 0
        self._digest = hashlib.sha256()
        self._rate, self._begun = max_rate, time.monotonic()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write all bytes of `data` and return their number. They are on the disk after `finish`."""
        left = memoryview(data).cast("B")
        size = len(left)
        while left:
            part, left = left[: _BLOCK - self._filled], left[_BLOCK - self._filled :]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            if self._filled == _BLOCK:
                self._write_block()
        return size

    def finish(self) -> str:
        """Flush everything to the disk and return its SHA-256 in hexadecimal."""
        if self._filled:
            self._write_block()
        if os.fstat(self._descriptor).st_size != self._written:
            os.ftruncate(self._descriptor, self._written)
        os.fsync(self._descriptor)
        return self._digest.hexdigest()

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()

    def _write_block(self) -> None:
        """Write the collected bytes. Past the cache, whole pages are written, and `finish` truncates the file."""
        page = mmap.PAGESIZE if self._is_direct() else 1
        whole = memoryview(self._block)
        self._digest.update(whole[: self._filled])
        self._put(whole[: -(-self._filled // page) * page])
        self._written, self._filled = self._written + self._filled, 0
        if self._rate is not None:
            time.sleep(max(0.0, self._begun + self._written / self._rate - time.monotonic()))

    def _put(self, left: memoryview) -> None:
        while left:
            try:
                written = os.write(self._descriptor, left)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._is_direct():
                    raise
                written = 0
            left = left[written:]
            if written % mmap.PAGESIZE or not written:
                # The disk requires larger blocks, or wrote a part of a page: continue through the cache.
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)

    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _opened(path: Path, direct: int = os.O_DIRECT) -> int:
    # A new file: a link of this name is not followed.
    path.unlink(missing_ok=True)
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL or not direct:
            raise
        return _opened(path, 0)
