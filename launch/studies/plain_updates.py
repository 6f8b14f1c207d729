"""Simpler ways to send weights to a rollout worker, which exact updates are compared with.

Every version is one blob: all weights in bf16, or their xor with the version before, compressed. Publishers and
receivers have the same methods as those of `deepspeed_compress.rollout`.
"""

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import zstandard
from torch import Tensor, nn

from deepspeed_compress.rollout.request_lock import RequestLock
from deepspeed_compress.rollout.store import Store

Code = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Coding:
    """Content of a version's blob.

    Attributes:
        differs: True for the xor with the version before; a receiver then needs every version.
        compress: compresses a blob.
        decompress: the opposite.
    """

    differs: bool
    compress: Code
    decompress: Code


def _unchanged(data: bytes) -> bytes:
    return data


CODINGS = {
    "whole": Coding(False, _unchanged, _unchanged),
    "zlib": Coding(True, lambda data: zlib.compress(data, 1), zlib.decompress),
    "zstd": Coding(True, lambda data: zstandard.compress(data, 1), zstandard.decompress),
}


def bits(model: nn.Module) -> Tensor:
    """Return the weights in bf16 as one flat tensor of int16, in host memory."""
    return torch.cat([parameter.detach().to(torch.bfloat16).view(-1) for parameter in model.parameters()]).view(
        torch.int16
    )


class PlainPublisher:
    """Publisher of one blob per version, which a thread encodes and stores.

    Attributes:
        sizes: bytes of each version.
    """

    def __init__(self, model: nn.Module, store: Store, coding: Coding) -> None:
        self._model, self._store, self._coding = model, store, coding
        self._old = torch.zeros_like(bits(model))
        self._thread = ThreadPoolExecutor(1)
        self._running: Future[int] | None = None
        self.sizes: list[int] = []

    def publish(self) -> None:
        """Publish the current weights."""
        self.wait()
        self._running = self._thread.submit(self._publish, len(self.sizes) + 1, bits(self._model))

    def wait(self) -> None:
        """Wait for the version that the thread publishes."""
        if self._running is not None:
            self.sizes.append(self._running.result())
            self._running = None

    def _publish(self, version: int, new: Tensor) -> int:
        content = new ^ self._old if self._coding.differs else new
        data = self._coding.compress(content.numpy().tobytes())
        self._old = new
        self._store.put(f"{version:06d}", data)
        return len(data)


class PlainReceiver:
    """Receiver of blobs in a module of bf16 or a wider type.

    Attributes:
        version: the held version; 0 before the first one.
    """

    def __init__(self, module: nn.Module, store: Store, coding: Coding) -> None:
        self._parameters = list(module.parameters())
        self._store, self._coding = store, coding
        self._held = torch.zeros_like(bits(module))
        self._lock = RequestLock()
        self.version = 0

    @contextmanager
    def request(self) -> Iterator[int]:
        """Keep updates out of the block."""
        with self._lock.request():
            yield self.version

    def update(self) -> bool:
        """Bring the module to the newest version, and return True if there was one."""
        newest = max((int(name) for name in self._store.names() if name.isdigit()), default=0)
        if newest == self.version:
            return False
        for version in range(self.version + 1, newest + 1) if self._coding.differs else [newest]:
            data = self._coding.decompress(self._store.get(f"{version:06d}"))
            content = torch.frombuffer(bytearray(data), dtype=torch.int16)
            self._held = self._held ^ content if self._coding.differs else content
        with self._lock.pause():
            sizes = [parameter.numel() for parameter in self._parameters]
            for one, values in zip(self._parameters, torch.split(self._held, sizes), strict=True):
                one.detach().view(-1).copy_(values.view(torch.bfloat16))
        self.version = newest
        return True
