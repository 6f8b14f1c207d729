"""Calls that write files, with their tensors in memory that another process can read.

A call is pickled, but for its tensors: these are copied into a `Memory`, where the process that writes finds them. So a
snapshot takes no longer than copying it, and what is written is what was there when it was taken.
"""

import io
import mmap
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["NOTHING", "Call", "Copies", "HostCopies", "Kept", "Memory", "Snapshot", "read_calls"]

_ALIGNMENT = 64


@dataclass(frozen=True)
class Call:
    """`function(*arguments)`, which writes `files`, and returns the SHA-256 of those that it knows. What it is made of
    can be pickled."""

    function: Callable[..., Mapping[Path, str] | None]
    arguments: tuple[Any, ...]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class _Slot:
    """Where a contiguous tensor lies, and what it is."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool = False

    def tensor(self, memory: mmap.mmap) -> Tensor:
        """The tensor in `memory`. Its storage is no larger than it: torch.save writes whole storages."""
        numel = torch.Size(self.shape).numel()
        if not numel:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(memory, dtype=self.dtype, count=numel, offset=self.offset).view(self.shape)


@dataclass(frozen=True)
class Kept:
    """What the process that writes is told of a snapshot: `size` bytes of memory, and in which of them each call is,
    pickled. It may be reading of another one still, so this is short: whoever tells it would wait."""

    size: int
    calls: tuple[slice, ...]


NOTHING = Kept(0, ())
Pin = Callable[[Tensor], object]


def _leave(memory: Tensor) -> None:
    """Nothing is done about it."""


def _flat(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


class Copies(Protocol):
    """How tensors get to where they are kept: pairs of a place on the host and what is copied there."""

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """What is copied may be changed when this has returned: programs do, between one step and the next."""

    def finish(self) -> None:
        """All copies are there. May run in another thread."""


class HostCopies:
    """By the processor that calls."""

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)

    def finish(self) -> None:
        """They are there."""


class Memory:
    """Anonymous memory with a file descriptor, which can be passed on; it grows, and is used again.

    Args:
        pin: is told of the memory, and may let a device write to it.
        unpin: is told when it is given up.
    """

    def __init__(self, pin: Pin = _leave, unpin: Pin = _leave) -> None:
        self._pin, self._unpin = pin, unpin
        self.descriptor = os.memfd_create("deepspeed_compress", os.MFD_CLOEXEC)
        self._bytes: mmap.mmap | None = None

    def reserve(self, size: int) -> mmap.mmap:
        """At least `size` bytes, and at least one page."""
        if self._bytes is None or size > len(self._bytes):
            size = max(size, mmap.PAGESIZE)
            os.ftruncate(self.descriptor, size)
            if self._bytes is not None:
                self._unpin(_flat(self._bytes))
            # Tensors in the former mapping hold it for as long as they live.
            self._bytes = mmap.mmap(self.descriptor, size)
            self._pin(_flat(self._bytes))
        return self._bytes


class Snapshot:
    """Calls whose tensors are kept as they are at `copy`.

    Args:
        memory: where they are kept; nobody else may use it until the snapshot is written.
        copies: how they get there.
    """

    def __init__(self, memory: Memory, copies: Copies) -> None:
        self._memory, self._copies = memory, copies
        self._calls: list[bytes] = []
        self._slots: dict[tuple[object, ...], _Slot] = {}
        self._end = 0
        self._waiting: list[tuple[_Slot, Tensor]] = []

    def add(self, call: Call) -> None:
        """Keep `call`, but for what its tensors hold."""
        stream = io.BytesIO()
        _Pickler(stream, self).dump(call)
        self._calls.append(stream.getvalue())

    def copy(self) -> None:
        """Copy all tensors. They may be changed then, though copies may be under way until `finish`."""
        memory = self._memory.reserve(self._size)
        for place, call in zip(self._places, self._calls, strict=True):
            memory[place] = call
        self._copies.begin([(slot.tensor(memory), tensor) for slot, tensor in self._waiting])
        self._waiting.clear()

    def finish(self) -> None:
        """All has been copied. May run beside training."""
        self._copies.finish()

    def kept(self) -> Kept:
        """How the calls are read, when everything has been copied."""
        return Kept(len(self._memory.reserve(self._size)), tuple(self._places))

    @property
    def _size(self) -> int:
        return self._end + sum(map(len, self._calls))

    @property
    def _places(self) -> list[slice]:
        """Of the calls, behind all tensors."""
        ends = list(accumulate(map(len, self._calls), initial=self._end))
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def place(self, tensor: Tensor) -> _Slot:
        """Where `tensor` will lie; the same tensor lies in one place."""
        own = (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
        key = (tensor.data_ptr(), tensor.stride(), tensor.device, *own)
        known = self._slots.get(key) if tensor.numel() else None
        if known is not None:
            return known
        slot = _Slot(self._end, *own)
        if tensor.numel():
            self._slots[key] = slot
            self._end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            self._waiting.append((slot, tensor.detach()))
        return slot


class _Pickler(pickle.Pickler):
    """Plain tensors become their slots, as torch.save writes them: without their graph. All else is pickled as ever."""

    def __init__(self, stream: io.BytesIO, snapshot: Snapshot) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._snapshot = snapshot

    def persistent_id(self, found: Any) -> _Slot | None:
        if type(found) is not Tensor or found.layout is not torch.strided or found.is_quantized:
            return None
        return self._snapshot.place(found)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, memory: mmap.mmap) -> None:
        super().__init__(stream)
        self._memory = memory

    def persistent_load(self, slot: _Slot) -> Tensor:
        return slot.tensor(self._memory).requires_grad_(slot.requires_grad)


def read_calls(kept: Kept, descriptor: int) -> Iterator[Call]:
    """The calls of a snapshot, in the process that writes."""
    if kept.calls:
        memory = mmap.mmap(descriptor, kept.size)
        yield from (_Unpickler(io.BytesIO(memory[place]), memory).load() for place in kept.calls)
