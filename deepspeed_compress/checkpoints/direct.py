"""A file that is written past the page cache, with its digest taken on the way.

Pages of the cache are made, filled and written back by the same processors that train; past it (open(2), O_DIRECT) the
disk reads what is to be written by itself, and a digest that is taken of each block on its way needs no second look at
the file. File systems that cannot do so are written to as ever.
"""

import errno
import fcntl
import hashlib
import io
import mmap
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["DirectFile"]

_BLOCK = 1 << 20
"""Bytes that are written at a time: they fit into a processor's own cache, from their copy to their digest."""


class DirectFile(io.RawIOBase):
    """A new file at `path`, for writing from its beginning to its end. Raises OSError as `open` and `os.write` do.

    Args:
        path: of the file, which is replaced.
        max_rate: bytes a second; None for as many as the disk takes.
    """

    def __init__(self, path: Path, max_rate: float | None = None) -> None:
        super().__init__()
        self._descriptor = _opened(path)
        # Of whole pages, at the beginning of one, as the disk wants it.
        self._block = mmap.mmap(-1, _BLOCK)
        self._filled = self._written = 0
        self._digest = hashlib.sha256()
        self._rate, self._begun = max_rate, time.monotonic()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """All of `data`, any bytes, which are on the disk after `finish`."""
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
        """The SHA-256 of all that was written, in hexadecimal, once it is on the disk."""
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
        """What has been collected; past the cache in whole pages, so that the file is cut when it is finished."""
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
                # It wants larger pages than ours, or took a part of one.
                fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)

    def _is_direct(self) -> bool:
        return bool(fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _opened(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)
