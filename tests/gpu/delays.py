"""Random delays of streams and of messages. Code that waits correctly gives the same bits."""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_compress.collectives.exchange import Link, PendingExchange
from deepspeed_compress.tools.bench.mirror import Letter, Mirror, reflect

LATE_MIRROR = "late_mirror"
"""Name of the backend in torch.distributed."""

_STREAMS: Mapping[int, tuple[str, ...]] = {
    0: (),
    1: ("reduction_stream",),
    2: ("reduction_stream",),
    3: ("reduce_and_partition_stream",),
}
"""Attributes of DeepSpeed's optimizer that hold streams, by ZeRO stage. They are None if the device has no streams."""
_CYCLES, _SECONDS = 2_000_000, 1e-3
"""Longest pause in cycles and in seconds: about a millisecond."""


@dataclass(frozen=True)
class _Pauses:
    """Pauses of random length on some of the streams. Equal seeds give equal pauses."""

    streams: tuple[Any, ...]
    random: random.Random

    def __call__(self, *_: object) -> None:
        current = (torch.cuda.current_stream(),) if torch.cuda.is_available() else ()
        for stream in (*self.streams, *current):
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
    with (
        _before(Link, "start", pause),
        _before(Link, "start_split", pause),
        _before(Link, "all_gather_split", pause),
        _before(Link, "all_gather", pause),
        _before(PendingExchange, "receive", pause),
    ):
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


@dataclass(frozen=True)
class Arrival:
    """Messages on a separate stream. Waiting makes the current stream wait for them."""

    event: Any

    def wait(self) -> bool:
        self.event.wait()
        return True


@dataclass
class LateDelivery:
    """Messages on the host, which are delivered when they are waited for."""

    deliver: Callable[[], object]
    delivered: bool = False

    def wait(self) -> bool:
        if not self.delivered:
            self.deliver()
            self.delivered = True
        return True


class Late:
    """Delay of messages.

    On the host, messages are delivered when they are waited for. On a GPU, they travel on a separate stream after a
    pause.
    """

    def __init__(self, device: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._stream: Any = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]

    def run(self, tensors: Sequence[Tensor], deliver: Callable[[], object]) -> Any:
        """Deliver messages between `tensors` by `deliver`: on the host when they are waited for."""
        if self._stream is None:
            return LateDelivery(deliver)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(_CYCLES * self._random.random()))  # type: ignore[no-untyped-call]
            deliver()
            for tensor in tensors:
                # As in NCCL, memory that is freed meanwhile must not be reused before the message has arrived.
                tensor.record_stream(self._stream)
            return Arrival(self._stream.record_event())

    def travel(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Arrival:
        """Deliver tensors on a GPU."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(_CYCLES * self._random.random()))  # type: ignore[no-untyped-call]
            for output, sent in zip(outputs, inputs, strict=True):
                reflect(sent, output)
                # As in NCCL, memory that is freed meanwhile must not be reused before the message has arrived.
                sent.record_stream(self._stream)
                output.record_stream(self._stream)
            return Arrival(self._stream.record_event())


class LateMirror(Mirror):
    """Mirror whose messages may be late, so that it is as asynchronous as NCCL, in a single process."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._late: Late | None = None

    def delay(self, late: Late | None) -> None:
        """Delay all further messages by `late`, or deliver them at once."""
        self._late = late

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return super().alltoall(outputs, inputs, opts) if self._late is None else self._late.travel(outputs, inputs)

    def alltoall_base(
        self, output: Tensor, sent: Tensor, outputs: Sequence[int], inputs: Sequence[int], opts: Any = None
    ) -> Any:
        if self._late is None:
            return super().alltoall_base(output, sent, outputs, inputs, opts)
        return self._late.run(
            [output, sent], lambda: super(LateMirror, self).alltoall_base(output, sent, outputs, inputs)
        )

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> Any:
        # DeepSpeed calls this as well, on the host only where it waits at once.
        if self._late is None or mine.dtype != torch.uint8:
            return super()._allgather_base(output, mine, opts)
        return self._late.run([output, mine], lambda: super(LateMirror, self)._allgather_base(output, mine))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        # On the host, only DeepSpeed calls this.
        if self._late is None or not inputs[0].is_cuda:
            return super().allgather(outputs, inputs, opts)
        return self._late.travel(outputs[0], [inputs[0]] * len(outputs[0]))

    def deliver(self, letter: Letter) -> None:
        if self._late is None:
            super().deliver(letter)


def _create(store: Any, rank: int, size: int, timeout: Any) -> LateMirror:
    return LateMirror(rank, size)


def join_late_mirror(size: int) -> None:
    """Make the default group of torch.distributed of this process and `size` - 1 images of it."""
    dist.Backend.register_backend(LATE_MIRROR, _create, devices=["cpu", "cuda"])
    dist.init_process_group(LATE_MIRROR, store=dist.HashStore(), rank=0, world_size=size)


def delay_messages(late: Late | None) -> None:
    """Delay the messages of all groups of this process by `late`, or deliver them at once."""
    for group in dist.distributed_c10d._world.pg_map:
        assert isinstance(group, LateMirror)
        group.delay(late)
