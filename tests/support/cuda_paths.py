"""The code paths for GPUs of DeepSpeed and this package, run on the CPU with `tests.support.streams`."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_compress.backends.deepspeed.gradients import zero_0, zero_12
from deepspeed_compress.collectives import exchange
from deepspeed_compress.compression import kernels
from tests.support.streams import Clock, Device, Event

_SHARED = 1 << 20
"""Tag of messages to all ranks. They are received before the next ones are sent."""


@dataclass(frozen=True)
class _Collective:
    """A collective of NCCL in progress. Only its caller holds references to its tensors."""

    device: Device
    over: Clock

    def wait(self) -> None:
        self.device.current.wait_clock(self.over)


@dataclass(frozen=True)
class _Group:
    """The group of `link` with NCCL's collectives, which wait for the current stream and run on their own stream."""

    link: exchange.Link
    gpu: "Gpu"
    tag: int

    def rank(self) -> int:
        return self.link.group.rank()

    def size(self) -> int:
        return self.link.group.size()

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Collective:
        return self._run("all-to-all", inputs, outputs, inputs)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> _Collective:
        [mine], [all_messages] = inputs, outputs
        return self._run("all-gather", [mine] * self.size(), all_messages, inputs)

    def alltoall_base(self, output: Tensor, sent: Tensor, outputs: list[int], inputs: list[int]) -> _Collective:
        return self._run("all-to-all", torch.split(sent, inputs), torch.split(output, outputs), [sent])

    def _allgather_base(self, output: Tensor, mine: Tensor) -> _Collective:
        messages = output.split(mine.numel())
        # NCCL's collective neither reads nor writes this rank's own message in place.
        others = [message for rank, message in enumerate(messages) if rank != self.rank()]
        return self._run("all-gather", [mine] * self.size(), messages, [mine], others)

    def _run(
        self,
        name: str,
        sent: Sequence[Tensor],
        received: Sequence[Tensor],
        inputs: Sequence[Tensor],
        written: Sequence[Tensor] | None = None,
    ) -> _Collective:
        nccl = self.gpu.nccl
        nccl.wait_stream(self.gpu.current)
        exchange._point_to_point(self.link, sent, received, self.tag).finish()
        with self.gpu.using(nccl):
            self.gpu.work(name, inputs, received if written is None else written)
        return _Collective(self.gpu, dict(nccl.clock))


class Gpu(Device):
    """A device with a separate stream for NCCL."""

    def __init__(self) -> None:
        super().__init__()
        self.nccl = self.stream("NCCL")

    def start(self, link: exchange.Link, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> Any:
        """Start an exchange as `Link.start` does on a GPU, over the group of `link`."""
        return exchange._all_to_all(exchange.Link(_Group(link, self, tag)), outgoing, incoming, tag)  # type: ignore[arg-type]

    def start_split(self, link: exchange.Link, *parts: Any) -> Any:
        """Start an exchange as `Link.start_split` does on a GPU."""
        return exchange._all_to_all_split(exchange.Link(_Group(link, self, _SHARED + 1)), *parts)  # type: ignore[arg-type]

    def all_gather_split(self, link: exchange.Link, *parts: Any) -> Any:
        """Start to send a message to all ranks as `Link.all_gather_split` does on a GPU, over the group of `link`."""
        return exchange._all_gather_split(exchange.Link(_Group(link, self, _SHARED)), *parts)  # type: ignore[arg-type]


@contextmanager
def on_streams() -> Iterator[Gpu]:
    """Make this process, which has only CPU tensors, run the code paths for GPUs."""
    gpu, accelerator = Gpu(), get_accelerator()
    kind = type(accelerator)
    values = {
        (kind, "Stream"): property(lambda _: gpu.stream),
        (kind, "Event"): property(lambda _: partial(Event, gpu)),
        (accelerator, "stream"): gpu.using,
        (accelerator, "current_stream"): lambda *_: gpu.current,
        (accelerator, "default_stream"): lambda *_: gpu.default,
        (accelerator, "synchronize"): lambda *_: gpu.host_waits(),
        (accelerator, "is_synchronized_device"): lambda: False,
        (accelerator, "use_host_timers"): lambda: True,
        (torch.cuda, "current_stream"): lambda *_: gpu.current,
        (Tensor, "record_stream"): lambda tensor, stream: gpu.record(tensor, stream),
        (exchange, "_BY_DEVICE"): {"cpu": exchange._Transport(gpu.start, gpu.start_split, gpu.all_gather_split)},
        (zero_0, "may_begin_early"): lambda *_: False,
        (zero_12, "may_wait"): lambda _: False,
    }
    with ExitStack() as stack:
        stack.enter_context(plain_torch())
        for (owner, name), value in values.items():
            stack.enter_context(patch.object(owner, name, value))
        yield stack.enter_context(gpu)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Use the plain torch kernels, whose operations can be observed."""
    with patch.dict(os.environ, {kernels.SWITCH: "torch"}):
        kernels._implementation.cache_clear()
        yield
    kernels._implementation.cache_clear()
