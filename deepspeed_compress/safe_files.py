"""Atomic writing of files, their locks between processes, and reading of files that others may have replaced.

Files are written under a temporary name and renamed, so they are either complete or absent, also if the disk is full.
A file that was replaced by a pipe, a device or an endless link is refused. The kernel releases locks when their process
ends.
"""

import fcntl
import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO

from deepspeed_compress.errors import ConfigError

LARGEST_TEXT = 1 << 28
"""Largest size in bytes of a text file that is read as a whole."""


def write_json(file: Path, value: object, private: bool = False) -> None:
    """Write `value` as indented JSON. If `private`, only the user can read the file, which may contain passwords."""
    write_text(file, json.dumps(value, indent=2) + "\n", private)


def write_text(file: Path, text: str, private: bool = False) -> None:
    """Replace the content of `file` by `text` atomically. If `private`, only the user can read the file."""
    # File names need not be UTF-8. Python's escapes for invalid bytes are written back as the original bytes.
    content = text.encode("utf-8", "surrogateescape")
    with replacing(file, temporary(file), private) as stream:
        stream.write(content)


@contextmanager
def replacing(file: Path, scratch: Path, private: bool = False) -> Iterator[BinaryIO]:
    """Yield the new file `scratch`, which is on disk and takes the name of `file` at the end.

    After an error, such as that of a full disk, `file` is as it was, and nothing is left of the new file.
    """
    scratch.unlink(missing_ok=True)
    try:
        # A new file: a link of this name is not followed. Nobody else can ever read the file if it is private.
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600 if private else 0o666)
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(descriptor)
        os.replace(scratch, file)
    except BaseException as error:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(file)
        raise


def sync_directory(directory: Path) -> None:
    """Make the names of files in `directory` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def completing(place: Path) -> Iterator[Path]:
    """Yield a new directory, which is on disk and takes the name `place` at the end.

    One process at a time may do this in a directory. What it leaves unfinished, the next one removes.
    """
    scratch = place.with_name("unfinished")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    yield scratch
    sync_directory(scratch)
    os.replace(scratch, place)
    sync_directory(place.parent)


def temporary(file: Path) -> Path:
    """Return a name that is unique to this thread, since others, also of an earlier run, may still write the file."""
    return file.with_name(f"{file.name}.{threading.get_native_id()}.tmp")


def open_own(path: str, flags: int) -> int:
    """Open `path` as an `opener` for `open`: never a link, and a new file is private to its user."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def open_regular(file: Path) -> BufferedReader:
    """Open a file for reading. Links to files are followed.

    Raises:
        OSError: it cannot be read, or is a pipe, a device, or a directory.
    """
    # Opening a pipe would wait for its writer.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{file} is not a regular file")
    return os.fdopen(descriptor, "rb")


_OPENED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
_KINDS = ((stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"), (stat.S_ISDIR, "a directory"))


def check_regular(path: str) -> None:
    """Check that reading `path` cannot block forever, as reading a FIFO might. Files opened by the shell are accepted.

    Raises:
        ConfigError: The path is not a regular file.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not os.path.abspath(path).startswith(_OPENED):
        kind = next((kind for test, kind in _KINDS if test(mode)), "a device")
        raise ConfigError(
            f"{path}: {kind} (allowed: a regular file). Write the path of one, or - to read standard input."
        )


def read_text(file: Path, limit: int = LARGEST_TEXT) -> str:
    """Return the text of a regular file.

    Raises:
        OSError: see `open_regular`.
        ValueError: the file is larger than `limit` bytes, or not UTF-8.
    """
    with open_regular(file) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{file} has more than {limit} bytes")
    return content.decode("utf-8")


LOCK = ".deepspeed_compress.lock"
"""File that `hold` locks in a directory."""


def lock(file: int | IO[Any], *, shared: bool = False, waits: bool = True) -> bool:
    """Lock an open file or directory until it is closed, by this process and those that it forks meanwhile.

    Returns:
        False on a file system without locks, where no process is excluded.

    Raises:
        BlockingIOError: another process holds the lock, and this one does not wait.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Exclude other processes that use this function for `path`, an existing file or directory. Waits for its turn."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def hold(directory: Path, name: str = LOCK) -> TextIO | None:
    """Lock the file `name` in `directory`, which is created if needed, until the returned file is closed.

    Returns None if another process holds the lock. The locks are POSIX locks, which belong to the process: a forked
    child that outlives it does not hold them, and the same process may lock a file twice, until it closes one of
    the files. On a file system without locks, no process is excluded.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = open(directory / name, "w", opener=open_own)  # noqa: SIM115  (held by the caller)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        return None
    except OSError:
        pass
    return file
