"""Compressed gathers and scattered sums of sequences of which tensor-parallel ranks hold parts.

Outside of layers that ranks share, each rank has a part of the sequence (Korthikanti et al., arXiv:2205.05198). A layer
gathers the parts before it, and sums and scatters its output after it. Gradients take the other of the two ways. All
ranks decode the same bytes of a gather, their own, too, so they get the same bits. A sum has this rank's own term
uncompressed, because no other rank gets it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.messages import ActivationMessages
from deepspeed_compress.backends.activations.sums import activation_codec, gradient_codec
from deepspeed_compress.collectives.exchange import Link, PendingExchange
from deepspeed_compress.monitor import Meter


@dataclass(frozen=True)
class SequenceParts:
    """Parts of sequences, the first dimension of tensors, on the ranks of `group`. Counts `bytes_tensor`."""

    group: ProcessGroup
    messages: ActivationMessages

    def gather(self, x: Tensor) -> Tensor:
        """Return the parts of all ranks, of which `x` ([n, ...]) is this rank's: [ranks * n, ...]. Collective."""
        ranks, rank = self.group.size(), self.group.rank()
        whole, mine = x.new_empty(ranks * len(x), *x.shape[1:]), self.messages.encode(x, ranks - 1)
        payloads = [mine if one == rank else self.messages.payload(x) for one in range(ranks)]
        self._wait(Link(self.group).all_gather(payloads, 0), (ranks - 1) * mine.nbytes, x)
        for payload, part in zip(payloads, whole.chunk(ranks), strict=True):
            self.messages.decode(payload, part)
        return whole

    def sum(self, x: Tensor) -> Tensor:
        """Return this rank's part ([n, ...]) of the sum of `x` ([ranks * n, ...]) over the ranks. Collective."""
        rank, parts = self.group.rank(), x.chunk(self.group.size())
        own = parts[rank].to(torch.float32)
        nothing = torch.empty(0, dtype=torch.uint8, device=x.device)
        sent = [nothing if one == rank else self.messages.encode(part) for one, part in enumerate(parts)]
        received = [nothing if one == rank else self.messages.payload(own) for one in range(len(parts))]
        self._wait(Link(self.group).start(sent, received, 0), sum(one.nbytes for one in sent), x)
        others = torch.empty_like(own)
        self.messages.decode_sum([payload for payload in received if payload is not nothing], others)
        return (own + others).to(x.dtype)

    def _wait(self, exchange: PendingExchange, size: int, x: Tensor) -> None:
        self.messages.meter.count("bytes_tensor", size)
        with self.messages.meter.phase("communicate", x.device):
            exchange.finish()


@dataclass(frozen=True)
class SequenceExchange:
    """Gathers and scattered sums in the forward pass (`activations`) and in the backward pass (`gradients`)."""

    activations: SequenceParts
    gradients: SequenceParts


def sequences_over(bits: int, bits_of_gradients: int, meter: Meter) -> Callable[[ProcessGroup], SequenceExchange]:
    """Return a function that returns the exchange over a group, the same one whenever it is called."""
    messages = [
        ActivationMessages(codec, meter, "bytes_tensor_saved")
        for codec in (activation_codec(bits), gradient_codec(bits_of_gradients))
    ]
    return cache(lambda group: SequenceExchange(*(SequenceParts(group, one) for one in messages)))


def gather_sequence(x: Tensor, exchange: SequenceExchange) -> Tensor:
    """Return the whole sequence, of which `x` is this rank's part. Its gradients are summed and scattered."""
    return _exchanged(x, exchange.activations.gather, exchange.gradients.sum)


def scatter_sum(x: Tensor, exchange: SequenceExchange) -> Tensor:
    """Return this rank's part of the sum of `x` over the ranks. Its gradients are gathered."""
    return _exchanged(x, exchange.activations.sum, exchange.gradients.gather)


def _exchanged(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    # PyTorch gives `apply` no types.
    found: Tensor = _Exchanged.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return found


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.exchange_gradients = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange_gradients(gradients[0]), None, None
