"""Parts of a version: the encoded slices of tensors that one rank publishes in one blob.

A part is an index in JSON, followed by the payloads of its slices. The index has the digest of each slice's values
after the update, so a receiver can check what it holds without holding any other version.
"""

import hashlib
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout.changes import count_changed
from deepspeed_compress.rollout.store import Store

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""SHA-256 in hexadecimal digits."""
Size = Annotated[int, Field(ge=0)]

_PART_BYTES = 64 << 20
"""Bytes of payload after which another part begins. A receiver holds one part of a full copy at a time."""
_ATTEMPTS = 3
"""Number of times that a part is fetched if it arrives damaged."""
_LENGTH = struct.Struct("<I")


class Record(BaseModel):
    """Base class of everything that a manifest consists of."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class PartEntry(Record):
    """A part: its name in the store, its bytes, its SHA-256, and the number of values that it changes."""

    name: str
    size: Size
    digest: Digest
    changed: Size


@dataclass(frozen=True, order=True, config=ConfigDict(extra="forbid"))
class SliceDigest:
    """Digest of a slice of a tensor: of rows of equal length, mostly of one.

    Attributes:
        name: name of the tensor.
        start: first element, in the flattened tensor.
        numel: number of elements in all rows.
        digest: SHA-256 of the values.
        rows: number of rows.
        stride: elements from the beginning of a row to that of the next; 0 if there is only one.
    """

    name: str
    start: Size
    numel: Size
    digest: Digest
    rows: Annotated[int, Field(ge=1)] = 1
    stride: Size = 0


@dataclass(frozen=True, order=True, kw_only=True)
class _IndexEntry(SliceDigest):
    """Entry of an index: a digest, and the bytes of the payload that leads to its values."""

    bytes: Size


@dataclass(frozen=True)
class EncodedSlice:
    """A slice after an update, and the payload that leads to it (see `changes.encode`)."""

    slice: SliceDigest
    payload: bytes


_INDEX = TypeAdapter(list[_IndexEntry])


def values_digest(values: Tensor) -> str:
    """Return the SHA-256 of the bits of a flat, contiguous tensor on the CPU."""
    return hashlib.sha256(values.detach().view(torch.uint8).numpy().data).hexdigest()


class PartWriter:
    """Writer of slices as one or several parts, of which one at a time is in memory.

    Args:
        store: the store.
        stem: beginning of the names of the parts.

    Attributes:
        seconds: seconds of writing so far.
    """

    def __init__(self, store: Store, stem: str) -> None:
        self._store, self._stem, self.seconds = store, stem, 0.0
        self._entries: list[PartEntry] = []
        self._slices: list[EncodedSlice] = []
        self._size = 0

    def add(self, one: EncodedSlice) -> None:
        """Add a slice, and store the part if it is large enough."""
        self._slices.append(one)
        self._size += len(one.payload)
        if self._size >= _PART_BYTES:
            self._write()

    def end(self) -> list[PartEntry]:
        """Store the last part, and return the entries of all of them."""
        if self._slices:
            self._write()
        return self._entries

    def _write(self) -> None:
        slices, self._slices, self._size = self._slices, [], 0
        name = f"{self._stem}.{len(self._entries):04d}"
        index = [_IndexEntry(**asdict(one.slice), bytes=len(one.payload)) for one in slices]
        head = _INDEX.dump_json(index, exclude_defaults=True)
        data = b"".join([_LENGTH.pack(len(head)), head, *(one.payload for one in slices)])
        began = time.perf_counter()
        self._store.put(name, data)
        self.seconds += time.perf_counter() - began
        changed, digest = sum(count_changed(one.payload) for one in slices), hashlib.sha256(data).hexdigest()
        self._entries.append(PartEntry(name=name, size=len(data), digest=digest, changed=changed))


def read_part(store: Store, entry: PartEntry) -> list[EncodedSlice]:
    """Return the slices of a part. If its digest differs from its entry, fetch it again.

    Raises:
        RolloutError: it is not in the store, or arrives damaged every time.
    """
    for _ in range(_ATTEMPTS):
        try:
            data = store.get(entry.name)
        except KeyError:
            raise RolloutError(f"part {entry.name} is no longer in the store") from None
        if len(data) == entry.size and hashlib.sha256(data).hexdigest() == entry.digest:
            return list(_slices(data))
    raise RolloutError(f"part {entry.name} has arrived damaged {_ATTEMPTS} times: its SHA-256 is not {entry.digest}")


def _slices(data: bytes) -> Iterator[EncodedSlice]:
    """Yield the slices of a part whose digest was checked.

    Raises:
        RolloutError: the part is malformed.
    """
    try:
        place = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        index = _INDEX.validate_json(data[_LENGTH.size : place])
    except (ValidationError, struct.error) as error:
        raise RolloutError(f"the index of a part is malformed: {error}") from error
    for entry in index:
        yield EncodedSlice(entry, data[place : place + entry.bytes])
        place += entry.bytes
