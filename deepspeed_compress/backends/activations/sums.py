"""Sums over tensor-parallel ranks, exact or compressed, and their place in the forward or the backward pass.

A compressed sum takes two shots: every rank sends each other rank its part of the elements, and then the sums of its
own part to all. Two ranks need only one: they send each other all elements, which are as many bytes in half of the
messages, and rounded once. All ranks decode the same bytes in the same order, their own, too, so they get the same
bits. Rounding is to the nearest code and depends on nothing but the values, so a layer that is recomputed gets the bits
of its first pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.messages import ActivationMessages
from deepspeed_compress.collectives.buckets import LAYOUTS, Partition, even_partition
from deepspeed_compress.collectives.exchange import Link, PendingExchange
from deepspeed_compress.collectives.messages import Channel, Messages
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.reducer import INSIDE_LEVEL, Run
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.monitor import Meter, ring_all_reduce


class TensorSum(Protocol):
    """A sum over the ranks that share a layer (`group`), collective, with the same bits on all of them."""

    @property
    def group(self) -> ProcessGroup: ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks as a new contiguous tensor of its shape and type.

        Its derivative is that of `x`, because every rank computes the same from the sum.
        """


SumOver = Callable[[ProcessGroup], TensorSum]
"""Function that returns the sum over a group."""
_Exchange = Callable[[Tensor], Tensor]
"""A `TensorSum`, or nothing."""


@dataclass(frozen=True)
class CompressedSum:
    """Sum over `group` by `reducer`, which counts what it sends."""

    group: ProcessGroup
    reducer: PayloadReducer

    def __call__(self, x: Tensor) -> Tensor:
        group, meter = self.group, self.reducer.run.meter
        if not ActivationMessages.carries(x):
            return _exact_sum(x, group, meter)
        total, before = x.clone(memory_format=torch.contiguous_format), meter.bytes_tensor
        self.reducer.all_reduce(total.detach().view(-1), _partition(total.numel(), group.size()), 1.0)
        meter.count("bytes_tensor_saved", ring_all_reduce(x.nbytes, group.size()) + before - meter.bytes_tensor)
        return total


@dataclass(frozen=True)
class PairSum:
    """Sum over two ranks, which send each other all elements. A chunk is encoded while the previous one is sent."""

    group: ProcessGroup
    messages: ActivationMessages
    chunk_numel: int

    def __call__(self, x: Tensor) -> Tensor:
        if not ActivationMessages.carries(x):
            return _exact_sum(x, self.group, self.messages.meter)
        total = x.clone(memory_format=torch.contiguous_format)
        chunks = torch.split(total.view(-1), self.chunk_numel)
        started = [self._start(chunk, number) for number, chunk in enumerate(chunks)]
        for chunk, (pending, both) in zip(chunks, started, strict=True):
            with self.messages.meter.phase("communicate", chunk.device):
                pending.finish()
            self.messages.decode(chunk, *both)
        return total

    def _start(self, chunk: Tensor, number: int) -> tuple[PendingExchange, list[Tensor]]:
        """Start to exchange a chunk. Return the exchange and both messages, by rank."""
        meter, mine = self.messages.meter, self.messages.encode(chunk)
        both = [mine if rank == self.group.rank() else torch.empty_like(mine) for rank in range(2)]
        meter.count("bytes_tensor", mine.nbytes)
        with meter.phase("communicate", mine.device):
            return Link(self.group).start([mine, mine], both, number), both


def _exact_sum(x: Tensor, group: ProcessGroup, meter: Meter) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    if x.numel():
        group.allreduce([total]).wait()
    meter.count("bytes_tensor", ring_all_reduce(x.nbytes, group.size()))
    return total


@lru_cache(maxsize=LAYOUTS)
def _partition(numel: int, ranks: int) -> Partition:
    return even_partition([("activations", numel)], ranks)


def compressed_sum(group: ProcessGroup, codec: Codec, run: Run) -> TensorSum:
    """Return a compressed sum over `group`, which counts `bytes_tensor` and is not limited by a rate of the host."""
    if group.size() == 2:
        return PairSum(group, ActivationMessages(codec, run.meter, "bytes_tensor_saved"), run.chunk_numel)
    messages = Messages((Channel(codec),), level=INSIDE_LEVEL)
    reducer = PayloadReducer(Link(group), messages, run, run.chunk_numel * group.size(), "bytes_tensor")
    return CompressedSum(group, reducer)


def sums_over(codec: Codec, run: Run) -> SumOver:
    """Return a function that returns the compressed sum over a group, the same one whenever it is called."""
    return cache(lambda group: compressed_sum(group, codec, run))


def sum_output(x: Tensor, total: _Exchange) -> Tensor:
    """Return the sum of `x`, whose gradient passes unchanged (g of Shoeybi et al., arXiv:1909.08053)."""
    return _exchanged(x, total, _unchanged)


def sum_gradient(x: Tensor, total: _Exchange) -> Tensor:
    """Return `x` as a tensor whose gradient is summed (f of Shoeybi et al., arXiv:1909.08053)."""
    return _exchanged(x, _unchanged, total)


def _unchanged(x: Tensor) -> Tensor:
    return x.view_as(x)


def _exchanged(x: Tensor, forward: _Exchange, backward: _Exchange) -> Tensor:
    # PyTorch gives `apply` no types.
    exchanged: Tensor = _Exchanged.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: _Exchange, backward: _Exchange) -> Tensor:
        ctx.exchange_gradients = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange_gradients(gradients[0]), None, None
