"""Compressed exchange of tokens between ranks, each of which has a part of the experts.

Every token is encoded by itself, so a number that is not finite spoils no other token. Tokens for experts of this rank
are not sent, and stay exact. Rounding is to the nearest code and depends on nothing but the token, so a layer that is
recomputed gets the bits of its first pass, and routes the tokens alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from deepspeed_compress.backends.activations.messages import BLOCK, DTYPES, activation_codec, gradient_codec
from deepspeed_compress.collectives.exchange import exchange
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.monitor import Meter

_SCALE_BYTES = 2
"""Bytes of the scale of a block."""


@dataclass(frozen=True)
class Route:
    """Rows that this rank sends to each rank of `group`, and those that it receives, in rank order."""

    group: ProcessGroup
    sent: tuple[int, ...]
    received: tuple[int, ...]

    def reversed(self) -> "Route":
        """Return the route back, which gradients take."""
        return Route(self.group, self.received, self.sent)

    def own(self, rows: Sequence[int]) -> slice:
        """Return the rows that stay on this rank, among `rows` (`sent` or `received`)."""
        rank = self.group.rank()
        first = sum(rows[:rank])
        return slice(first, first + rows[rank])


def row_bytes(width: int, bits: int) -> int:
    """Return the bytes of an encoded row of `width` elements: a scale and the codes of each block."""
    return -(-width // BLOCK) * (_SCALE_BYTES + BLOCK * bits // 8)


def is_smaller(x: Tensor, bits: int) -> bool:
    """Return True if rows of `x` are of a type that can be compressed, and take fewer bytes then."""
    return x.dtype in DTYPES and row_bytes(x.shape[-1], bits) < x.shape[-1] * x.element_size()


@dataclass(frozen=True)
class _Exchange:
    """Exchange of rows, each encoded with padding to whole blocks, which counts `bytes_experts`."""

    codec: Codec
    bits: int
    meter: Meter

    def __call__(self, x: Tensor, route: Route) -> Tensor:
        """Return the rows that this rank receives for `x` ([rows, width]), in its type."""
        width, mine = x.shape[1], route.own(route.sent)
        with self.meter.phase("compress", x.device):
            outgoing = self._encode(x)
        incoming = outgoing.new_zeros(sum(route.received), row_bytes(width, self.bits))
        with self.meter.phase("communicate", x.device):
            parts = torch.split(outgoing, list(route.sent)), torch.split(incoming, list(route.received))
            exchange(route.group, *parts)
        away = len(x) - (mine.stop - mine.start)
        self.meter.count("bytes_experts", away * incoming.shape[1])
        self.meter.count("bytes_experts_saved", away * (width * x.element_size() - incoming.shape[1]))
        with self.meter.phase("decompress", x.device):
            found = self._decode(incoming, width).to(x.dtype).contiguous()
            found[route.own(route.received)] = x[mine]
        return found

    def _encode(self, rows: Tensor) -> Tensor:
        """Return `rows` ([n, width]) as uint8 [n, row_bytes]: for each row its scales, and then its codes."""
        padded = pad(rows.detach().to(torch.float32), (0, -rows.shape[1] % BLOCK)).contiguous()
        payload = self._payload(padded)
        self.codec.encode(padded.view(-1), (), payload, key=0)
        return torch.cat(self._scales_and_codes(payload, padded), 1)

    def _decode(self, encoded: Tensor, width: int) -> Tensor:
        """Return the rows (fp32 [n, width]) of `encoded`."""
        padded = torch.empty(len(encoded), width + -width % BLOCK, dtype=torch.float32, device=encoded.device)
        payload = self._payload(padded)
        scales, codes = self._scales_and_codes(payload, padded)
        scales.copy_(encoded[:, : scales.shape[1]])
        codes.copy_(encoded[:, scales.shape[1] :])
        self.codec.decode([payload], (), padded.view(-1), 1.0)
        return padded[:, :width]

    def _payload(self, padded: Tensor) -> Tensor:
        size = self.codec.compressor.payload_bytes(padded.numel())
        return torch.empty(size, dtype=torch.uint8, device=padded.device)

    def _scales_and_codes(self, payload: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of `payload` by rows, without the padding between scales and codes (see `BlockFormat`)."""
        rows, width = padded.shape
        scales, codes = width // BLOCK * _SCALE_BYTES, width * self.bits // 8
        return payload[: rows * scales].view(rows, scales), payload[len(payload) - rows * codes :].view(rows, codes)


@dataclass(frozen=True)
class Leg:
    """One way of the tokens, to the experts or back: `bits`, and the exchanges in the forward and backward pass."""

    bits: int
    tokens: _Exchange
    gradients: _Exchange


def make_leg(bits: int, meter: Meter) -> Leg:
    """Return a way of the tokens that is compressed in both passes."""
    return Leg(bits, *(_Exchange(codec(bits), bits, meter) for codec in (activation_codec, gradient_codec)))


def exchange_rows(
    rows: Tensor,
    leg: Leg,
    group: ProcessGroup,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> Tensor:
    """Return the rows that this rank of `group` receives for `rows` ([n, width]). Splits are equal if they are None."""
    equal = [len(rows) // group.size()] * group.size()
    splits = (tuple(map(int, equal if some is None else some)) for some in (sent, received))
    # PyTorch gives `apply` no types.
    found: Tensor = ExchangeTokens.apply(rows, leg, Route(group, *splits))  # type: ignore[no-untyped-call]
    return found


class ExchangeTokens(torch.autograd.Function):
    """Rows that the ranks of a route exchange in the forward pass. Their gradients take the route back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leg: Leg, route: Route) -> Tensor:
        ctx.leg, ctx.route = leg, route
        return leg.tokens(x, route)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.leg.gradients(gradients[0], ctx.route.reversed()), None, None
