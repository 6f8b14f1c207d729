"""What outlives a parameter server: its tensors in a file of safetensors, and a log of the calls that came after.

A call is in the log, on the disk, before anybody hears of it, and calls are carried out alike whenever they are
repeated; so a server that was killed has exactly what it had. When the log is longer than what it changes, tensors are
written anew, under a temporary name, and the log begins again.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepspeed_compress.errors import StateError
from deepspeed_compress.services.parameter_server.frames import Buffer, Head, receive, send
from deepspeed_compress.services.rendezvous.server import hold, put_in_place

__all__ = ["Entry", "Ledger"]

Entry = tuple[Sequence[Head], Sequence[Buffer]]
"""What the ranks of an island have said."""
_RECORDS = "records"
_SERIAL = "serial"


class Ledger:
    """In the file `path`, and beside it `path`.log. ConfigError where another server has it, StateError where it is
    damaged."""

    def __init__(self, path: Path) -> None:
        self._path, self._log_path = path, path.with_suffix(path.suffix + ".log")
        self._held = hold(path)
        self._serial = 0
        self._log: FileIO | None = None

    @property
    def logged(self) -> int:
        """Bytes."""
        return self._log.tell() if self._log is not None else 0

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """What was written last; None where nothing was."""
        if not self._path.exists():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                about = file.metadata()
                self._serial = int(about[_SERIAL])
                return json.loads(about[_RECORDS]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise StateError(
                f"{self._path} is damaged or not of a parameter server ({error!r}); give another file"
            ) from error

    def entries(self) -> Iterator[Entry]:
        """The calls since, but for one that was cut off."""
        if not self._log_path.exists():
            return
        with self._log_path.open("rb") as file:
            found = _next(file)
            if found is None or found[0].get(_SERIAL) != self._serial:
                # Of before: all of it is in the tensors.
                return
            end = file.tell()
            while (found := _next(file)) is not None:
                end = file.tell()
                yield found[0]["heads"], _cut(found[1], found[0]["sizes"])
        os.truncate(self._log_path, end)

    def write(self, records: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """All there is; the log begins again."""
        self._serial += 1
        temporary = self._path.with_suffix(self._path.suffix + ".tmp")
        about = {_RECORDS: json.dumps(records), _SERIAL: str(self._serial)}
        save_file(dict(tensors), temporary, metadata=about)
        _sync(temporary)
        put_in_place(temporary, self._path)
        if self._log is not None:
            self._log.close()
        # Without a buffer, in which what a full disk has refused would wait to be written later.
        self._log = FileIO(self._log_path, "w")
        self._append({"kind": "log", _SERIAL: self._serial})

    def append(self, heads: Sequence[Head], bodies: Sequence[Buffer]) -> None:
        """On the disk when this returns, as a whole or not at all. OSError."""
        self._append({"kind": "call", "heads": list(heads), "sizes": [len(one) for one in bodies]}, *bodies)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._held.close()

    def _append(self, head: Head, *bodies: Buffer) -> None:
        assert self._log is not None, "what there is was written first"
        begun, whole = self._log.tell(), BytesIO()
        send(whole, head, b"".join(bodies))
        left = whole.getbuffer()
        try:
            while left:
                left = left[self._log.write(left) :]
            os.fsync(self._log.fileno())
        except OSError:
            self._log.truncate(begun)
            self._log.seek(begun)
            raise


def _next(file: BinaryIO) -> tuple[dict[str, Any], bytearray] | None:
    try:
        return receive(file)
    except (EOFError, ValueError):
        return None


def _cut(body: bytearray, sizes: Sequence[int]) -> list[bytearray]:
    found, begin = [], 0
    for size in sizes:
        found.append(body[begin : begin + size])
        begin += size
    return found


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
