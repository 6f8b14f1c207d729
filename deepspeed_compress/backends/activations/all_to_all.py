"""Compressed all-to-all: each rank sends every other rank its part of a tensor as one message.

A rank's own part is copied. Rounding is to the nearest code and depends on nothing but the values, so a layer that is
recomputed gets the bits of its first pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.messages import ActivationMessages
from deepspeed_compress.collectives.exchange import Link, PendingExchange

Splits = Sequence[int] | None
"""Rows of a tensor for each rank; None for equal shares."""


@dataclass(frozen=True)
class AllToAllCall:
    """Arguments of the method `all_to_all_single` of DeepSpeed's backends, with the names and the order from there."""

    output: Tensor
    input: Tensor
    output_split_sizes: Splits = None
    input_split_sizes: Splits = None
    group: Any = None
    async_op: bool = False

    def parts(self) -> Sequence[Tensor]:
        """Return the parts of the input, by the rank that gets each."""
        return _split(self.input, self.input_split_sizes, self.group.size())

    def shares(self) -> Sequence[Tensor]:
        """Return the parts of the output, by the rank that sends each."""
        return _split(self.output, self.output_split_sizes, self.group.size())

    def bytes_sent(self) -> int:
        """Return the bytes that this rank sends to others."""
        own: int = self.parts()[self.group.rank()].nbytes
        return self.input.nbytes - own


def _split(tensor: Tensor, splits: Splits, ranks: int) -> tuple[Tensor, ...]:
    flat: Any = tensor.detach()
    return tuple(flat.split(list(splits)) if splits else flat.chunk(ranks))


@dataclass(frozen=True)
class PendingAllToAll:
    """Handle of an all-to-all in progress, which `wait` decodes into `shares`, one part of the output for each rank.

    It keeps `outgoing` alive until then.
    """

    messages: ActivationMessages
    pending: PendingExchange
    outgoing: Sequence[Tensor]
    incoming: Sequence[Tensor]
    shares: Sequence[Tensor]

    def wait(self) -> bool:
        """Wait for the messages and write them into the output. Return True, as handles of torch do."""
        with self.messages.meter.phase("communicate", self.shares[0].device):
            self.pending.finish()
        for payload, share in zip(self.incoming, self.shares, strict=True):
            if payload.numel():
                self.messages.decode(payload, share)
        return True


@dataclass(frozen=True)
class CompressedAllToAll:
    """All-to-all over `group`, which counts what it sends as `bytes_sequence`."""

    group: ProcessGroup
    messages: ActivationMessages

    def start(self, call: AllToAllCall) -> PendingAllToAll:
        """Start the all-to-all of contiguous floating-point tensors over `group`."""
        own, parts, shares = self.group.rank(), call.parts(), call.shares()
        shares[own].copy_(parts[own])
        outgoing = self._for_others(parts, self.messages.encode)
        incoming = self._for_others(shares, self.messages.payload)
        self.messages.meter.count("bytes_sequence", sum(payload.numel() for payload in outgoing))
        return PendingAllToAll(self.messages, Link(self.group).start(outgoing, incoming, 0), outgoing, incoming, shares)

    def _for_others(self, parts: Sequence[Tensor], message: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return the `message` of each part, empty if it is this rank's own or has no elements."""
        nothing = parts[0].new_empty(0, dtype=torch.uint8)
        return [
            message(part) if part.numel() and rank != self.group.rank() else nothing for rank, part in enumerate(parts)
        ]
