"""Snapshots of calls that write files, with their tensors in memory that another process can read.

A call is pickled except for its tensors, which are copied into a `Memory` that the writer process shares. A snapshot
takes no longer than this copy, and the files contain the values at the time of the snapshot.
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

_ALIGNMENT = 64


@dataclass(frozen=True)
class Call:
    """A call `function(*arguments)` that writes `files` and returns the SHA-256 of some of them. Must be picklable."""

    function: Callable[..., Mapping[Path, str] | None]
    arguments: tuple[Any, ...]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class _Slot:
    """Location and type of a contiguous tensor in a memory."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool = False

    def tensor(self, memory: mmap.mmap) -> Tensor:
        """Return the tensor in `memory`.

        Its storage is no larger than the tensor, because torch.save writes whole storages.
        """
        numel = torch.Size(self.shape).numel()
        if not numel:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(memory, dtype=self.dtype, count=numel, offset=self.offset).view(self.shape)


@dataclass(frozen=True)
class Kept:
    """Description of a snapshot for the writer process: the `size` of its memory and the slices of its pickled calls.

    It must be short: the writer may still be busy with another snapshot, and a long message would block the sender.
    """

    size: int
    calls: tuple[slice, ...]


NOTHING = Kept(0, ())
Pin = Callable[[Tensor], object]


def _leave(memory: Tensor) -> None:
    """Do nothing."""


def _flat(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


class Copies(Protocol):
    """Interface for copying tensors to host memory, given pairs of target and source."""

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Start to copy. Sources may change as soon as this returns, as programs do between steps."""

    def finish(self) -> None:
        """Wait for all copies. May run in another thread."""


class HostCopies:
    """Synchronous copies by the calling thread."""

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        for target, source in pairs:
            target.copy_(source)

    def finish(self) -> None:
        """Return at once, since `begin` has copied everything."""


class Memory:
    """Growable, reusable anonymous memory with a file descriptor that can be passed to other processes.

    Args:
        pin: called with the memory; may let a device write to it.
        unpin: called when the memory is released.
    """

    def __init__(self, pin: Pin = _leave, unpin: Pin = _leave) -> None:
        self._pin, self._unpin = pin, unpin
        self.descriptor = os.memfd_create("deepspeed_compress", os.MFD_CLOEXEC)
        self._bytes: mmap.mmap | None = None

    def reserve(self, size: int) -> mmap.mmap:
        """Return a mapping of at least `size` bytes and at least one page."""
        if self._bytes is None or size > len(self._bytes):
            size = max(size, mmap.PAGESIZE)
            os.ftruncate(self.descriptor, size)
            if self._bytes is not None:
                self._unpin(_flat(self._bytes))
            # Tensors in the old mapping keep it alive.
            self._bytes = mmap.mmap(self.descriptor, size)
            self._pin(_flat(self._bytes))
        return self._bytes

    def close(self) -> None:
        """Free the memory, in which no snapshot may be pending."""
        os.close(self.descriptor)
        if self._bytes is not None:
            self._unpin(_flat(self._bytes))
            self._bytes = None


class Snapshot:
    """Calls with the values that their tensors have at `copy`.

    Args:
        memory: destination of the values. It must not be used otherwise until the snapshot is written.
        copies: method of copying.
    """

    def __init__(self, memory: Memory, copies: Copies) -> None:
        self._memory, self._copies = memory, copies
        self._calls: list[bytes] = []
        self._slots: dict[tuple[object, ...], _Slot] = {}
        self._end = 0
        self._waiting: list[tuple[_Slot, Tensor]] = []

    def add(self, call: Call) -> None:
        """Add `call`, without the values of its tensors."""
        stream = io.BytesIO()
        _Pickler(stream, self).dump(call)
        self._calls.append(stream.getvalue())

    def copy(self) -> None:
        """Copy all tensors. They may change afterwards, although copies may be in progress until `finish`."""
        memory = self._memory.reserve(self._size)
        for place, call in zip(self._places, self._calls, strict=True):
            memory[place] = call
        self._copies.begin([(slot.tensor(memory), tensor) for slot, tensor in self._waiting])
        self._waiting.clear()

    def finish(self) -> None:
        """Wait for all copies. May run concurrently with training."""
        self._copies.finish()

    def kept(self) -> Kept:
        """Return the description from which the calls can be read, after everything has been copied."""
        return Kept(len(self._memory.reserve(self._size)), tuple(self._places))

    @property
    def _size(self) -> int:
        return self._end + sum(map(len, self._calls))

    @property
    def _places(self) -> list[slice]:
        """Return the slices of the pickled calls, which follow all tensors."""
        ends = list(accumulate(map(len, self._calls), initial=self._end))
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def place(self, tensor: Tensor) -> _Slot:
        """Return the slot for `tensor`. The same tensor always has the same slot."""
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
    """Pickler that replaces plain tensors by their slots, without their autograd graph, like torch.save."""

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
    """Yield the calls of a snapshot, in the writer process."""
    if kept.calls:
        memory = mmap.mmap(descriptor, kept.size)
        yield from (_Unpickler(io.BytesIO(memory[place]), memory).load() for place in kept.calls)
