"""Encoding of vectors as single messages between two processes that share no process group, with error feedback."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.collectives.messages import MessageLayout, Messages, layouts_of_parts
from deepspeed_compress.collectives.reduction import Reductions
from deepspeed_compress.compression.compressors.base import message_key
from deepspeed_compress.compression.segments import Segment, elements, scatter
from deepspeed_compress.config import CompressedGradients, GradientsConfig
from deepspeed_compress.local_sgd.exchange import payload_reducer


@dataclass(frozen=True)
class FramedMessages:
    """Encoder and decoder of flat fp32 vectors. Messages are numbered from 1, because codecs may differ between them.

    Attributes:
        settings: compression of the vectors.
        segments: the slices of parameters that make up a vector, in order.
        reductions: builder of reducers whose stores hold the residuals.
    """

    settings: GradientsConfig
    segments: Sequence[Segment]
    reductions: Reductions

    @property
    def exact(self) -> bool:
        """Return True if vectors are sent uncompressed."""
        return not isinstance(self.settings, CompressedGradients)

    def size(self, number: int) -> int:
        """Return the number of bytes of message `number`."""
        return self._message(number)[1].sizes[0]

    def encode(self, x: Tensor, number: int, sender: int, remember: bool) -> Tensor:
        """Return message number `number` of `sender`: uint8, on the device of `x`.

        Args:
            x: flat fp32 vector.
            number: number of the message, from 1.
            sender: number that is unique to the sender.
            remember: add the residuals of earlier messages to `x`, and store the new residuals.
        """
        messages, layout = self._message(number)
        payload = torch.empty(layout.sizes[0], dtype=torch.uint8, device=x.device)
        for piece in layout.pieces[0]:
            channel, key = messages.channels[piece.channel], message_key((number, piece.channel), sender)
            found = channel.codec.coefficients(elements(x, piece.segments), piece.segments)
            out = payload[piece.begin : piece.end]
            if remember:
                channel.feedback.encode(found, piece.segments, out, key, channel.codec)
            else:
                channel.codec.compressor.compress(found, out, key)
        return payload

    def decode(self, payload: Tensor, number: int) -> Tensor:
        """Return the vector of message `number`: flat fp32. The size of `payload` must be right."""
        messages, layout = self._message(number)
        x = torch.zeros(sum(one.numel for one in self.segments), device=payload.device)
        for piece in layout.pieces[0]:
            part, codec = x.new_empty(piece.numel), messages.channels[piece.channel].codec
            codec.decode([payload[piece.begin : piece.end]], piece.segments, part, 1.0)
            scatter(part, piece.segments, x)
        return x

    def _message(self, number: int) -> tuple[Messages, MessageLayout]:
        messages = payload_reducer(self.reductions, self.settings, number).messages
        return messages, layouts_of_parts(messages, [self.segments])[0]


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of `tensor`, which is flat and on the host."""
    return memoryview(tensor.view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


def read_bytes(body: bytes | bytearray | memoryview, dtype: torch.dtype) -> Tensor:
    """Return the flat tensor in the memory of `body`."""
    return torch.frombuffer(body, dtype=dtype) if len(body) else torch.zeros(0, dtype=dtype)
