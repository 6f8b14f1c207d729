"""Copies from a GPU to the host on a separate stream, for which neither the host nor training waits."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_compress.checkpointing.snapshot import Copies, HostCopies, Memory


def copies_for_device() -> Copies:
    """Return the kind of copies with which snapshots are taken from this process's accelerator."""
    accelerator = get_accelerator()
    return HostCopies() if accelerator.is_synchronized_device() else StreamCopies(accelerator.Stream())


def make_memory() -> Memory:
    """Return snapshot memory, pinned on CUDA. Without pinning, copies are correct but slower."""
    if get_accelerator().device_name() != "cuda":
        return Memory()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return Memory(
        pin=lambda memory: runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0),
        unpin=lambda memory: runtime.cudaHostUnregister(memory.data_ptr()),
    )


class StreamCopies:
    """Copies on a separate stream.

    `stream` waits for the current stream's earlier work, and the current stream's later work waits for the copies.
    Sources are kept alive until `finish`.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._read: list[Tensor] = []

    def begin(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Start the copies: pairs of (host target, device source)."""
        self._stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                self._read.append(source)
        self._hold_up()

    def _hold_up(self) -> None:
        """Make the current stream wait for the copies.

        Otherwise the program could change the sources, or the allocator reuse them, before they are read.
        """
        get_accelerator().current_stream().wait_stream(self._stream)

    def finish(self) -> None:
        """Wait on the host for the copies, and release the sources."""
        self._stream.synchronize()
        self._read.clear()
