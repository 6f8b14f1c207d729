"""A group of ranks of which this process is the first, and all others do what it does: no network, no waiting.

What a rank computes is there, at the cost that it has, and what it sends comes back. It is what a compressed step costs
where the network is not the limit; what is learnt that way is nothing, for the other ranks' parts are copies.
"""

# mypy: disable-error-code="assignment, attr-defined, call-arg, override"
# What torch says of process groups is of those that are written in C++.

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

__all__ = ["Mirror", "join_mirror"]


def join_mirror(size: int) -> None:
    """The default group of torch.distributed: this process, and its image `size` - 1 times."""
    if not hasattr(dist.Backend, "MIRROR"):
        dist.Backend.register_backend("mirror", _create, devices=["cpu", "cuda"])
    dist.init_process_group("mirror", store=dist.HashStore(), rank=0, world_size=size)


def _create(store: Any, rank: int, size: int, timeout: Any) -> "Mirror":
    return Mirror(rank, size)


def _done() -> Any:
    future: Future[Any] = Future()
    future.set_result(None)
    return _create_work_from_future(future)


class Mirror(dist.ProcessGroup):
    """The collectives that DeepSpeed and the package call, as copies on this rank's device; see torch's of these names.

    An all-to-all gives back what was sent, or zeros where it has another length.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._posted: dict[tuple[int, int], Tensor] = {}

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
        # One by one: `mine` may be a part of the output.
        for part in output.view(self.size(), -1):
            part.copy_(mine.view(-1))
        return _done()

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        torch.mul(whole.view(self.size(), *output.shape)[self.rank()], self.size(), out=output)
        return _done()

    # As torch from 2.13 on calls them.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for output, sent in zip(outputs, inputs, strict=True):
            self._reflect(sent, output)
        return _done()

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        self._posted[source, tag] = tensors[0]
        return _done()

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Any:
        """To a receive that was posted before, as `exchange` has it."""
        if (posted := self._posted.pop((target, tag), None)) is not None:
            self._reflect(tensors[0], posted)
        return _done()

    def _reflect(self, sent: Tensor, output: Tensor) -> None:
        if sent.shape == output.shape:
            output.copy_(sent)
        else:
            output.zero_()
