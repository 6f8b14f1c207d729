"""Copies from a GPU to the host on a stream of their own, for which neither the host nor training waits."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_compress.checkpoints.snapshot import Copies, HostCopies, Memory

__all__ = ["StreamCopies", "copies_for_device", "make_memory"]


def copies_for_device() -> Copies:
    """How snapshots are taken from the accelerator of this process."""
    accelerator = get_accelerator()
    return HostCopies() if accelerator.is_synchronized_device() else StreamCopies(accelerator.Stream())


def make_memory() -> Memory:
    """To which a GPU of CUDA writes by itself. Where that cannot be, copies are right, and slower."""
    if get_accelerator().device_name() != "cuda":
        return Memory()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return Memory(
        pin=lambda memory: runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0),
        unpin=lambda memory: runtime.cudaHostUnregister(memory.data_ptr()),
    )


class StreamCopies:
    """`stream` reads what the current stream has written; what that does next comes after the copies. Until `finish`
    all that is read is kept."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._read: list[Tensor] = []

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                self._read.append(source)
        self._hold_up()

    def _hold_up(self) -> None:
        """The program may change what is read, and the allocator give it away."""
        get_accelerator().current_stream().wait_stream(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()
        self._read.clear()
