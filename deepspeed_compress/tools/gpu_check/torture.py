"""Random delays of streams. Code that waits correctly gives the same bits."""

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch

from deepspeed_compress.collectives.exchange import Link, PendingExchange

__all__ = ["late_streams"]

_STREAMS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {0: (), 1: ("reduction_stream",), 2: ("reduction_stream",), 3: ("reduce_and_partition_stream",)}
)
"""Attributes of DeepSpeed's optimizer that hold streams, by ZeRO stage. They are None if the device has no streams."""
_CYCLES, _SECONDS = 2_000_000, 1e-3
"""Longest pause in cycles and in seconds: about a millisecond."""


@dataclass(frozen=True)
class _Pauses:
    """Pauses of random length on some of the streams. Equal seeds give equal pauses."""

    streams: tuple[Any, ...]
    random: random.Random

    def __call__(self, *_: object) -> None:
        for stream in self.streams:
            if self.random.random() < 0.5:
                self._pause(stream)

    def _pause(self, stream: Any) -> None:
        if stream is None:
            time.sleep(_SECONDS * self.random.random())
            return
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(_CYCLES * self.random.random()))  # type: ignore[no-untyped-call]


@contextmanager
def late_streams(engine: Any, stage: int, seed: int) -> Iterator[None]:
    """Pause before every exchange, before it is waited for, and after the backward pass of every layer."""
    own = torch.cuda.current_stream() if torch.cuda.is_available() else None
    pause = _Pauses((own, *(getattr(engine.optimizer, name) for name in _STREAMS[stage])), random.Random(seed))
    hooks = [one.register_full_backward_hook(pause) for one in engine.module.modules() if not list(one.children())]
    with _before(Link, "start", pause), _before(PendingExchange, "wait_for", pause):
        yield
    for hook in hooks:
        hook.remove()


def _before(owner: type, name: str, action: _Pauses) -> Any:
    """Return a context in which `action` is called before every call of a method."""
    method = getattr(owner, name)

    def late(*args: Any, **keywords: Any) -> Any:
        action()
        return method(*args, **keywords)

    return patch.object(owner, name, late)
