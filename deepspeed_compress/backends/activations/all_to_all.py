"""Compressed all-to-all: each rank sends every other rank its part of a tensor as one message.

A rank's own part is copied. Rounding is to the nearest code and depends on nothing but the values, so a layer that is
recomputed gets the bits of its first pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.exchange import Link, PendingExchange
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.monitor import Meter

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
    """Handle of an all-to-all in progress, which `wait` decodes into `shares`, one part of the output for each rank."""

    exchange: "CompressedAllToAll"
    pending: PendingExchange
    outgoing: Sequence[Tensor]
    incoming: Sequence[Tensor]
    shares: Sequence[Tensor]

    def wait(self) -> bool:
        """Wait for the messages and write them into the output. Return True, as handles of torch do."""
        device = self.shares[0].device
        with self.exchange.meter.phase("communicate", device):
            self.pending.finish()
        with self.exchange.meter.phase("decompress", device):
            for payload, share in zip(self.incoming, self.shares, strict=True):
                self.exchange.decode(payload, share)
        return True


@dataclass(frozen=True)
class CompressedAllToAll:
    """All-to-all over `group`, which counts what it sends as `traffic`, and what it saves as `traffic`_saved."""

    group: ProcessGroup
    codec: Codec
    meter: Meter
    traffic: str

    def start(self, call: AllToAllCall) -> PendingAllToAll:
        """Start the all-to-all of contiguous floating-point tensors over `group`."""
        own, parts, shares = self.group.rank(), call.parts(), call.shares()
        shares[own].copy_(parts[own])
        with self.meter.phase("compress", call.input.device):
            outgoing = [self._payload(part, rank == own) for rank, part in enumerate(parts)]
            for payload, part in zip(outgoing, parts, strict=True):
                self._encode(part, payload)
        incoming = [self._payload(share, rank == own) for rank, share in enumerate(shares)]
        self._count(outgoing, call.bytes_sent())
        return PendingAllToAll(self, Link(self.group).start(outgoing, incoming, 0), outgoing, incoming, shares)

    def _payload(self, part: Tensor, is_own: bool) -> Tensor:
        """Return a buffer for the message that carries `part`, empty if nothing is sent."""
        size = 0 if is_own else self.codec.compressor.payload_bytes(part.numel())
        return torch.empty(size, dtype=torch.uint8, device=part.device)

    def _encode(self, part: Tensor, payload: Tensor) -> None:
        if payload.numel():
            self.codec.encode(part.detach().reshape(-1).to(torch.float32), (), payload, key=0)

    def decode(self, payload: Tensor, share: Tensor) -> None:
        """Overwrite `share` with what `payload` holds, unless the payload is empty."""
        if payload.numel():
            values = torch.empty(share.numel(), dtype=torch.float32, device=share.device)
            self.codec.decode([payload], (), values, 1.0)
            share.copy_(values.view_as(share))

    def _count(self, outgoing: Sequence[Tensor], alone: int) -> None:
        sent = sum(payload.numel() for payload in outgoing)
        self.meter.count(self.traffic, sent)
        self.meter.count(f"{self.traffic}_saved", alone - sent)
