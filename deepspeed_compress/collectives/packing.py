"""Content of packed messages: what a rank encodes for others, and the sums of what others have encoded for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.collectives.messages import Channel, MessageLayout, Messages
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.compression.codec import Batch, Part
from deepspeed_compress.compression.compressors.base import random_key
from deepspeed_compress.compression.kernels.arguments import Keys
from deepspeed_compress.compression.segments import Segment


@dataclass(frozen=True)
class Packer:
    """Encoder and decoder of the `messages` of one reducer, whose error feedback it updates.

    Attributes:
        messages: settings that both ends share.
        run: state of the run.
        rank: this rank in the group of the reducer.
        sender: number of the sender in the keys of random numbers for parts that are sent to owners.
    """

    messages: Messages
    run: Run
    rank: int
    sender: int

    def pack(self, bucket: Tensor, layout: MessageLayout, number: int) -> Tensor:
        """Return the messages of this rank's values of the elements of all other owners, one after another: uint8."""
        out, keys = new_message(bucket.device, sum(layout.outgoing_sizes)), self._keys(number, self.sender)
        for index, batch in layout.outgoing:
            channel = self.messages.channels[index]
            x, at = batch.read(bucket, flat=not channel.codec.is_plain)
            x = channel.codec.coefficients_all(x, at, batch)
            channel.feedback.encode_all(x, at, batch, out, keys, channel.codec)
        return out

    def pack_owned(self, total: Tensor, layout: MessageLayout, number: int, in_basis: bool, out: Tensor) -> None:
        """Write the message of the elements that this rank owns to `out`: uint8 [layout.size].

        `total` holds them in message order, as elements or, if `in_basis`, as the codec's coefficients.
        """
        # Keyed by the rank, not by the sender: what an owner sends back is the same on every node.
        keys = self._keys(number, self.rank)
        for piece in layout.pieces:
            channel, key = self._channel(piece), keys.of(self.rank, piece.channel)
            x = _part(total, piece)
            x = x if in_basis else channel.codec.coefficients(x, piece.segments)
            channel.mean_feedback.encode(x, piece.segments, out[piece.begin : piece.end], key, channel.codec)

    def unpack(self, payload: Tensor, batches: Sequence[tuple[int, Batch]], bucket: Tensor) -> None:
        """Write the messages of owners, of which `payload` holds those of all, into their segments of `bucket`."""
        for index, batch in batches:
            channel = self.messages.channels[index]
            x, at = batch.place(bucket, flat=not channel.codec.is_plain)
            channel.codec.decode_all(payload, batch, x, at)
            for part, total in batch.views(x, at) if channel.spread is not None else ():
                total.copy_(self._delivered(total, channel, part.segments))
            if x is not bucket:
                batch.scatter(x, bucket)

    def sum(
        self, local: Tensor, payloads: Tensor, layout: MessageLayout, number: int, scale: float, deliver: bool
    ) -> None:
        """Overwrite `local` by `scale` times the sum of this rank's elements, fp32.

        Args:
            local: this rank's values in message order.
            payloads: messages of the other ranks, which are added in this order: uint8 [others, layout.size].
            layout: layout of the messages.
            number: number of the messages.
            scale: factor of the sum.
            deliver: compute elements for the optimizer; otherwise, compute coefficients for `pack_owned`.
        """
        for piece in layout.pieces:
            own, channel = _part(local, piece), self._channel(piece)
            exact, encoded = self._own_part(own, payloads[:, piece.begin : piece.end], piece, number)
            codec = channel.codec
            total = own if exact is None else exact.mul_(scale)
            if deliver:
                codec.decode(encoded, piece.segments, total, scale, add=exact is not None)
                own.copy_(self._delivered(total, channel, piece.segments))
            else:
                total = own.zero_() if exact is None else codec.coefficients(total, piece.segments)
                codec.add_coefficients(encoded, total, scale)
                own.copy_(total)

    def _own_part(self, own: Tensor, parts: Tensor, piece: Part, number: int) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Return this rank's exact contribution to a part, and the messages to add to it.

        If this rank contributes nothing exactly, the first value is None and its own encoded message comes first.
        """
        channel, segments = self._channel(piece), piece.segments
        exact = channel.feedback.keep(own, segments, channel.codec)
        if exact is not None:
            return exact, [parts]
        mine = new_message(own.device, piece.end - piece.begin)
        key = self._keys(number, self.sender).of(self.rank, piece.channel)
        channel.feedback.encode(channel.codec.coefficients(own, segments), segments, mine, key, channel.codec)
        return None, [mine, parts]

    def _channel(self, piece: Part) -> Channel:
        return self.messages.channels[piece.channel]

    def _keys(self, number: int, sender: int) -> Keys:
        run = self.run
        return Keys(random_key(run.seed, run.clock.step, self.messages.level, number), sender)

    def _delivered(self, total: Tensor, channel: Channel, segments: Sequence[Segment]) -> Tensor:
        spread = channel.spread
        return total if spread is None else spread.deliver(total, segments, self.run.clock.step)


def new_message(device: torch.device, size: int = 0) -> Tensor:
    """Return an uninitialized uint8 buffer for a message of `size` bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def _part(flat: Tensor, piece: Part) -> Tensor:
    return flat[piece.first : piece.first + piece.numel]
