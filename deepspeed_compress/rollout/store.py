"""Storage for versions: named, immutable blobs of bytes."""

import io
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.safe_files import replacing

LARGEST = 1 << 28
"""Bytes of the largest blob: a part with the largest slice, and more than half a million names."""
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,120}")


class Store(Protocol):
    """Storage of named blobs, which publishing ranks and receivers share.

    A blob that can be read is complete. Errors of the storage itself are OSErrors.
    """

    def put(self, name: str, data: bytes) -> None:
        """Store `data` as `name`. It replaces an older blob of that name at once."""

    def get(self, name: str) -> bytes:
        """Return a blob.

        Raises:
            KeyError: there is none of that name.
        """

    def names(self) -> Sequence[str]:
        """Return the names of all blobs. Names that a killed writer has left unfinished end in ".unfinished"."""

    def delete(self, name: str) -> None:
        """Delete a blob if it exists."""


class DirectoryStore:
    """Store in a directory that publishing ranks and receivers share, for example on NFS.

    A blob is written to a temporary name of its own in the same directory, synced, and renamed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, data: bytes) -> None:
        self.put_pieces(name, [data])

    def put_pieces(self, name: str, pieces: Iterable[bytes | memoryview]) -> None:
        """Store the content that `pieces` add up to. Nothing changes if they raise an error."""
        file = self._file(name)
        temporary = file.with_name(f"{name}.{secrets.token_hex(4)}.unfinished")
        try:
            with replacing(file, temporary) as stream:
                for piece in pieces:
                    stream.write(piece)
        except FileNotFoundError:
            raise OSError(f"{name} was deleted while it was written; has another publisher started?") from None

    def get(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def open(self, name: str) -> io.BufferedReader:
        """Return a blob as an open file, which stays as it is if the blob is replaced or deleted.

        Raises:
            KeyError: there is none of that name.
            RolloutError: it is too large.
        """
        try:
            file = self._file(name).open("rb")
        except FileNotFoundError:
            raise KeyError(name) from None
        size = os.fstat(file.fileno()).st_size
        if size > LARGEST:
            file.close()
            raise RolloutError(f"{name} has {size} bytes (allowed: {LARGEST})")
        return file

    def names(self) -> Sequence[str]:
        return [entry.name for entry in os.scandir(self._path)]

    def delete(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        """Return the path of a blob.

        Raises:
            RolloutError: the name has other characters than lowercase letters, digits, "." and "-".
        """
        if _NAME.fullmatch(name) is None:
            raise RolloutError(f"{name!r} is not a name of a blob (allowed: lowercase letters, digits, '.' and '-')")
        return self._path / name
