"""Messages of activations, each one tensor encoded as bytes, their codecs, and all-to-alls of such messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.exchange import Link, PendingExchange
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import Blockwise
from deepspeed_compress.compression.transforms import Hadamard, Identity
from deepspeed_compress.monitor import Meter

BLOCK = 64
"""Elements that share a scale. Scales are bf16, so 8 bits take 8.25 bits per element, and 4 bits 4.25."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of tensors that are compressed. Others, such as fp64, are sent as they are."""


@dataclass(frozen=True)
class ActivationMessages:
    """Messages of one model, encoded by `codec`. What they save is counted as `saved`."""

    codec: Codec
    meter: Meter
    saved: str = "bytes_pipeline_saved"

    @staticmethod
    def carries(tensor: Tensor) -> bool:
        """Return True if `tensor` can be compressed."""
        return tensor.dtype in DTYPES and tensor.numel() > 0

    def encode(self, tensor: Tensor, receivers: int = 1) -> Tensor:
        """Return the message that carries `tensor` to a number of receivers."""
        payload = self.payload(tensor)
        with self.meter.phase("compress", tensor.device):
            self.codec.encode(tensor.detach().reshape(-1).to(torch.float32), (), payload, key=0)
        self.meter.count(self.saved, receivers * (tensor.nbytes - payload.nbytes))
        return payload

    def decode(self, tensor: Tensor, *payloads: Tensor) -> None:
        """Overwrite `tensor` with the sum of what `payloads` carry."""
        with self.meter.phase("decompress", tensor.device):
            values = torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)
            self.codec.decode(payloads, (), values, 1.0)
            tensor.detach().copy_(values.view_as(tensor))

    def payload(self, tensor: Tensor) -> Tensor:
        """Return a buffer for the message that carries `tensor`."""
        size = self.codec.compressor.payload_bytes(tensor.numel())
        return torch.empty(size, dtype=torch.uint8, device=tensor.device)


def activation_codec(bits: int) -> Codec:
    """Return the codec of activations. With 4 bits, a rotation spreads their outliers over a block."""
    return Codec(gradient_codec(bits).compressor, Hadamard(BLOCK) if bits < 8 else Identity())


def gradient_codec(bits: int) -> Codec:
    """Return the codec of gradients of activations, which a rotation would not help."""
    return Codec(Blockwise(bits, BLOCK, scale_dtype=torch.bfloat16))


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
                self.messages.decode(share, payload)
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
