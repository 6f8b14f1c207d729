"""A process group in which this process is rank 0 and all other ranks mirror it: no network and no waiting.

The work of a rank is done at its real cost, and what it sends comes back to it. This shows the cost of a compressed
step without a network limit. With `Late` messages it is as asynchronous as NCCL, in a single process. The training
result is meaningless, because the other ranks' parts are copies.
"""

# mypy: disable-error-code="assignment, attr-defined, call-arg, override"
# torch's types describe process groups that are implemented in C++.

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

__all__ = ["Late", "Mirror", "join_mirror"]

_CYCLES = 2_000_000
"""Maximum delay of a message on a GPU in clock cycles: about a millisecond."""


def join_mirror(size: int) -> None:
    """Create the default group of torch.distributed from this process and `size` - 1 mirror images."""
    if not hasattr(dist.Backend, "MIRROR"):
        dist.Backend.register_backend("mirror", _create, devices=["cpu", "cuda"])
    dist.init_process_group("mirror", store=dist.HashStore(), rank=0, world_size=size)


def _create(store: Any, rank: int, size: int, timeout: Any) -> "Mirror":
    return Mirror(rank, size)


def _done() -> Any:
    future: Future[Any] = Future()
    future.set_result(None)
    return _create_work_from_future(future)


@dataclass
class _Letter:
    """Receive on the host. The message is read and written when it is waited for; if none was sent, it is zeros."""

    target: Tensor
    sent: Tensor | None = None
    read: bool = False

    def wait(self) -> bool:
        if not self.read:
            _reflect(self.sent, self.target)
            self.read = True
        return True


@dataclass(frozen=True)
class _Arrival:
    """Messages on a separate stream. Waiting makes the current stream wait for them."""

    event: Any

    def wait(self) -> bool:
        self.event.wait()
        return True


class Late:
    """Delay of messages.

    On the host, messages are delivered when they are waited for. On a GPU, they travel on a separate stream after a
    pause.
    """

    def __init__(self, device: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._stream: Any = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]

    def travel(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> _Arrival:
        """Deliver tensors on a GPU."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(int(_CYCLES * self._random.random()))  # type: ignore[no-untyped-call]
            for output, sent in zip(outputs, inputs, strict=True):
                _reflect(sent, output)
                # As in NCCL, memory that is freed meanwhile must not be reused before the message has arrived.
                sent.record_stream(self._stream)
                output.record_stream(self._stream)
            return _Arrival(self._stream.record_event())


def _reflect(sent: Tensor | None, output: Tensor) -> None:
    if sent is not None and sent.shape == output.shape:
        output.copy_(sent)
    else:
        output.zero_()


class Mirror(dist.ProcessGroup):
    """Process group with the collectives that DeepSpeed and the package call, as copies on this rank's device.

    See torch's collectives of the same names. An all-to-all, or a send with its receive, returns what was sent, or
    zeros if it has another length. It does so at once, or when `late` decides.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.late: Late | None = None
        self._posted: dict[tuple[int, int], _Letter] = {}

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return "mirror"

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self.size())
        return _done()

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return _done()

    def barrier(self, opts: Any = None) -> Any:
        return _done()

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for parts, mine in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(mine)
        return _done()

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> Any:
        # Copy one by one, because `mine` may be a part of the output.
        for part in output.view(self.size(), -1):
            part.copy_(mine.view(-1))
        return _done()

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        torch.mul(whole.view(self.size(), *output.shape)[self.rank()], self.size(), out=output)
        return _done()

    # Names of the same methods in torch 2.13 and later.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        if self.late is not None:
            return self.late.travel(outputs, inputs)
        for output, sent in zip(outputs, inputs, strict=True):
            _reflect(sent, output)
        return _done()

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        letter = self._posted[source, tag] = _Letter(tensors[0])
        return letter

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Any:
        """Send to the last receive that was posted, in the order that `exchange` uses."""
        if (letter := self._posted.pop((target, tag), None)) is not None:
            letter.sent = tensors[0]
            if self.late is None:
                letter.wait()
        return _done()
