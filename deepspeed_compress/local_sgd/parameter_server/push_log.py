"""Persistent state of a parameter server: its tensors in a safetensors file, and a log of the later calls.

A call is on disk, in the log, before anybody is told of it, and replaying calls gives the same results; so a server
that was killed resumes in exactly the state in which it was. When the log is longer than the tensors that it changes,
they are written again, under a temporary name, and a new log begins.
"""

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO, FileIO
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from deepspeed_compress.errors import StateError
from deepspeed_compress.local_sgd.coordinator.server import lock_file, rename_durably
from deepspeed_compress.local_sgd.parameter_server.calls import integer
from deepspeed_compress.local_sgd.parameter_server.entries import read_entry, write_entry
from deepspeed_compress.local_sgd.parameter_server.records import Records
from deepspeed_compress.local_sgd.parameter_server.store import Store
from deepspeed_compress.transport.connection import Buffer
from deepspeed_compress.transport.frames import Head

Entry = tuple[Sequence[Head], Sequence[Buffer]]
"""Heads and bodies of all ranks of an island."""
_RECORDS = "records"
_SERIAL = "serial"
_CHECKSUM = "crc32"
_DAMAGE = (OSError, SafetensorError, ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


class PushLog:
    """File `path`, and `path`.log next to it.

    Raises:
        ConfigError: if another server holds the file.
        StateError: if a file is damaged or does not belong to a parameter server.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._log_path = path, path.with_suffix(path.suffix + ".log")
        self._lock = lock_file(path)
        self._serial = 0
        self._log: FileIO | None = None

    @property
    def logged(self) -> int:
        """Return the number of bytes in the log."""
        return self._log.tell() if self._log is not None else 0

    def read(self) -> Store | None:
        """Return the store that was written last; None if there is none."""
        if not self._path.exists():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                about = file.metadata()
                self._serial = int(about[_SERIAL])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)
            return Store(Records.read(json.loads(about[_RECORDS])), tensors)
        except _DAMAGE as error:
            raise self._damaged(self._path, error) from error

    def entries(self) -> Iterator[Entry | ValueError]:
        """Yield the calls since then, and the error in place of a damaged one. A truncated call is removed."""
        if not self._log_path.exists():
            return
        with self._log_path.open("rb") as file:
            found = self._next(file)
            if found is None or found[0].get(_SERIAL) != self._serial:
                # The log is older than the tensors, which include all of it.
                return
            end = file.tell()
            while (found := self._next(file)) is not None:
                end = file.tell()
                yield _entry(*found)
        os.truncate(self._log_path, end)

    def write(self, store: Store) -> None:
        """Write everything, and begin a new log. Raises OSError if that is not possible; the log then goes on."""
        temporary, serial = self._path.with_suffix(self._path.suffix + ".tmp"), self._serial + 1
        about = {_RECORDS: json.dumps(store.records.as_json()), _SERIAL: str(serial)}
        if self._log is None:
            # Unbuffered: a buffer would keep what a full disk has refused, and write it later.
            self._log = FileIO(self._log_path, "a")
        try:
            save_file(store.tensors(), temporary, metadata=about)
            _sync(temporary)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise OSError(f"{temporary}: {error}") from error
        rename_durably(temporary, self._path)
        # From here on, nothing needs room or a descriptor: the old log does not fit the new state.
        self._serial = serial
        self._log.truncate(0)
        self._log.seek(0)

    def append(self, heads: Sequence[Head], bodies: Sequence[Buffer]) -> None:
        """Append an entry. It is on disk when this returns, as a whole or not at all. Raises OSError."""
        assert self._log is not None, "the store was written first"
        begun, whole, body = self._log.tell(), BytesIO(), b"".join(bodies)
        if not begun:
            write_entry(whole, {"kind": "log", _SERIAL: self._serial})
        about = {"heads": list(heads), "sizes": [len(one) for one in bodies], _CHECKSUM: zlib.crc32(body)}
        write_entry(whole, {"kind": "call", **about}, body)
        left = whole.getbuffer()
        try:
            while left:
                left = left[self._log.write(left) :]
            os.fsync(self._log.fileno())
        except OSError:
            self._log.truncate(begun)
            self._log.seek(begun)
            raise

    def close(self) -> None:
        """Close the files, and release them for another server."""
        if self._log is not None:
            self._log.close()
        self._lock.close()

    def _next(self, file: BinaryIO) -> tuple[dict[str, Any], bytearray] | None:
        """Return the next head and body; None at the end, and at the point at which a crash has truncated the log."""
        begun = file.tell()
        try:
            return read_entry(file)
        except EOFError:
            return None
        except _DAMAGE as error:
            raise self._damaged(self._log_path, ValueError(f"at byte {begun}: {error}")) from error

    def _damaged(self, path: Path, error: Exception) -> StateError:
        self.close()
        return StateError(
            f"{path} is damaged or does not belong to a parameter server ({error!r}); restore it, or give another "
            "--state file"
        )


def _entry(head: Mapping[str, Any], body: bytearray) -> Entry | ValueError:
    heads, sizes = head.get("heads"), head.get("sizes")
    try:
        if not isinstance(heads, list) or not all(isinstance(one, dict) for one in heads):
            raise ValueError("it has no heads")
        if not isinstance(sizes, list) or sum(integer(size, "sizes") for size in sizes) != len(body):
            raise ValueError("its sizes are not those of its bodies")
        if head.get(_CHECKSUM, zlib.crc32(body)) != zlib.crc32(body):
            raise ValueError("its bodies are damaged")
    except ValueError as error:
        return error
    return heads, _cut(body, sizes)


def _cut(body: bytearray, sizes: Sequence[int]) -> list[bytearray]:
    return [body[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
