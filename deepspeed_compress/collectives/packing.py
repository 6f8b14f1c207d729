"""Content of packed messages: what a rank encodes for others, and the sums of what others have encoded for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.collectives.messages import Channel, MessageLayout, Messages, Piece
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.compression.compressors.base import message_key
from deepspeed_compress.compression.segments import contiguous_view, elements, scatter


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

    def pack(self, bucket: Tensor, layout: MessageLayout, owner: int, number: int) -> Tensor:
        """Return the message of this rank's values of the elements of `owner`: uint8 [layout.sizes[owner]]."""
        payload = new_message(bucket.device, layout.sizes[owner])
        for piece in layout.pieces[owner]:
            channel, key = self._channel(piece), self._key(number, owner, piece, self.sender)
            x = channel.codec.coefficients(elements(bucket, piece.segments), piece.segments)
            channel.feedback.encode(x, piece.segments, payload[piece.begin : piece.end], key, channel.codec)
        return payload

    def pack_owned(self, total: Tensor, layout: MessageLayout, number: int, in_basis: bool) -> Tensor:
        """Return the message of the elements that this rank owns: uint8 [layout.sizes[rank]].

        `total` holds them in message order, as elements or, if `in_basis`, as the codec's coefficients.
        """
        payload = new_message(total.device, layout.sizes[self.rank])
        for piece in layout.pieces[self.rank]:
            # Keyed by the rank, not by the sender: what an owner sends back is the same on every node.
            channel, key = self._channel(piece), self._key(number, self.rank, piece, self.rank)
            x = _part(total, piece)
            x = x if in_basis else channel.codec.coefficients(x, piece.segments)
            channel.mean_feedback.encode(x, piece.segments, payload[piece.begin : piece.end], key, channel.codec)
        return payload

    def unpack(self, payload: Tensor, pieces: Sequence[Piece], bucket: Tensor) -> None:
        """Write the message of an owner into the segments of `bucket` that it owns."""
        for piece in pieces:
            view = contiguous_view(bucket, piece.segments)
            total = bucket.new_empty(piece.numel, dtype=torch.float32) if view is None else view
            self._channel(piece).codec.decode([payload[piece.begin : piece.end]], piece.segments, total, 1.0)
            delivered = self._delivered(total, piece)
            if delivered is not view:
                scatter(delivered, piece.segments, bucket)

    def sum(
        self, local: Tensor, payloads: Sequence[Tensor], layout: MessageLayout, number: int, scale: float, deliver: bool
    ) -> None:
        """Overwrite `local` by `scale` times the sum of this rank's elements, fp32.

        Args:
            local: this rank's values in message order.
            payloads: messages of the other ranks, which are added in this order.
            layout: layout of the messages.
            number: number of the messages.
            scale: factor of the sum.
            deliver: compute elements for the optimizer; otherwise, compute coefficients for `pack_owned`.
        """
        for piece in layout.pieces[self.rank]:
            own, parts = _part(local, piece), [payload[piece.begin : piece.end] for payload in payloads]
            if deliver:
                own.copy_(self._delivered(self._sum_elements(own, parts, piece, number, scale), piece))
            else:
                own.copy_(self._sum_coefficients(own, parts, piece, number, scale))

    def _sum_elements(self, own: Tensor, parts: Sequence[Tensor], piece: Piece, number: int, scale: float) -> Tensor:
        """Return `scale` times the sum of `own`, which is overwritten, and the `parts` of the other ranks."""
        codec = self._channel(piece).codec
        exact, parts = self._own_part(own, parts, piece, number)
        if exact is None:
            codec.decode(parts, piece.segments, own, scale)
            return own
        codec.decode_add(parts, piece.segments, exact.mul_(scale), scale)
        return exact

    def _sum_coefficients(
        self, own: Tensor, parts: Sequence[Tensor], piece: Piece, number: int, scale: float
    ) -> Tensor:
        """Return the coefficients of the sum that `_sum_elements` describes."""
        codec = self._channel(piece).codec
        exact, parts = self._own_part(own, parts, piece, number)
        total = own.zero_() if exact is None else codec.coefficients(exact.mul_(scale), piece.segments)
        codec.add_coefficients(parts, total, scale)
        return total

    def _own_part(
        self, own: Tensor, parts: Sequence[Tensor], piece: Piece, number: int
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Return this rank's exact contribution to a part, and the messages to add to it.

        If this rank contributes nothing exactly, the first value is None and its own encoded message comes first.
        """
        channel, segments = self._channel(piece), piece.segments
        exact = channel.feedback.keep(own, segments, channel.codec)
        if exact is not None:
            return exact, parts
        mine, key = new_message(own.device, piece.end - piece.begin), self._key(number, self.rank, piece, self.sender)
        channel.feedback.encode(channel.codec.coefficients(own, segments), segments, mine, key, channel.codec)
        return None, [mine, *parts]

    def _channel(self, piece: Piece) -> Channel:
        return self.messages.channels[piece.channel]

    def _key(self, number: int, owner: int, piece: Piece, sender: int) -> int:
        run, level = self.run, self.messages.level
        return message_key((run.seed, run.clock.step, level, number, owner, piece.channel), sender)

    def _delivered(self, total: Tensor, piece: Piece) -> Tensor:
        spread = self._channel(piece).spread
        return total if spread is None else spread.deliver(total, piece.segments, self.run.clock.step)


def new_message(device: torch.device, size: int = 0) -> Tensor:
    """Return an uninitialized uint8 buffer for a message of `size` bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def _part(flat: Tensor, piece: Piece) -> Tensor:
    return flat[piece.first : piece.first + piece.numel]
