"""All-gather of updated weights as compressed differences to the weights that every rank already holds.

Source: the weight differences of Jia et al., "SDP4Bit" (arXiv:2410.15526, section 3.1). The owner of the master weights
sends C(master - held), and every rank, the owner too, makes held <- round(held + decoded). The next difference is taken
to the new held weights, so what one message left out is in the next one: error feedback without a residual.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import even_partition
from deepspeed_compress.communication.contracts import LEVELS, Messages, StepClock
from deepspeed_compress.communication.exchange import Flight, start_exchange
from deepspeed_compress.communication.plan import CodecOf, Piece, Plan, make_plans
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors.base import message_key
from deepspeed_compress.compression.compressors.cast import Cast
from deepspeed_compress.compression.segments import gather, scatter

__all__ = ["CHUNK_NUMEL", "EXACT", "DifferenceGather"]

EXACT = 0
"""Codec of the parameters that are not compressed: the master travels, rounded to the type of the held weights."""

_LEVEL = -1
"""Tells its random numbers from those of gradients (see `PayloadReducer`)."""

CHUNK_NUMEL = 1 << 20
"""Elements that a rank sends in one message: few enough to stay in a cache from one pass to the next."""


class Meter(Protocol):
    """Where bytes and times are counted (`monitor.Meter`)."""

    bytes_weights: int
    bytes_weights_saved: int

    def phase(self, name: str, device: torch.device) -> AbstractContextManager[None]: ...


class DifferenceGather:
    """Brings new weights from the ranks that own their masters to all ranks of `group`: one flat buffer, every step.

    `sizes`: (name, numel) of the parameters in the order of the buffer, padding included under any name. The ranks own
    near-equal runs of it (`even_partition`, which is DeepSpeed's cut). `dtype`: the buffer's; fp32, bf16 or fp16.
    `codec_of` gives `EXACT` for a parameter, or i for `codecs[i - 1]`.

    What all ranks hold must be the same bits, and is so afterwards: all decode the same payloads onto the same weights,
    with one fp32 sum and one rounding an element. A master that is not finite spoils what is encoded together with it
    (its block), on every rank alike and until `synchronise`.

    A buffer goes in rounds of at most `chunk_numel` elements a rank; the next one is encoded while one travels. That
    bounds the work space: two payloads from every rank, and a few fp32 [chunk_numel].
    """

    def __init__(
        self,
        group: ProcessGroup,
        sizes: Sequence[tuple[str, int]],
        dtype: torch.dtype,
        codecs: Sequence[Codec],
        codec_of: CodecOf,
        clock: StepClock,
        meter: Meter,
        seed: int = 0,
        chunk_numel: int = CHUNK_NUMEL,
    ) -> None:
        self.group = group
        self.clock = clock
        self._messages = Messages(clock)
        self.meter = meter
        self.seed = seed
        self._rank: int = group.rank()
        self._codecs = (Codec(Cast(dtype)), *codecs)
        partition = even_partition(sizes, group.size())
        parts = [partition.owned_by(rank) for rank in range(group.size())]
        self._numels = [sum(segment.numel for segment in part) for part in parts]
        rounds = -(-max(self._numels) // chunk_numel)
        self._plans = make_plans(partition, self._codecs, codec_of, rounds)

    def own(self, held: Tensor) -> Tensor:
        """The part of `held` that this rank has the masters of: a view."""
        return torch.split(held, self._numels)[self._rank]

    @torch.no_grad()
    def gather(self, held: Tensor, master: Tensor) -> None:
        """Move the weights of all ranks towards their masters.

        `held`: the flat buffer, updated in place; this rank's own part too must be as the others have it. `master`:
        flat, the masters of `own(held)`, of any floating type and on any device; not changed.
        """
        flights: deque[tuple[Plan, list[Tensor], Flight]] = deque()
        for plan in self._plans:
            flights.append((plan, *self._send(held, master, plan)))
            if len(flights) > 1:
                self._land(held, *flights.popleft())
        while flights:
            self._land(held, *flights.popleft())

    @torch.no_grad()
    def synchronise(self, held: Tensor, master: Tensor) -> None:
        """The weights of all ranks become their masters, rounded: uncompressed. Arguments as of `gather`."""
        parts = torch.split(held, self._numels)
        parts[self._rank].copy_(master)
        # It has no number: random numbers must not depend on how often weights were saved.
        flight = self._start([part.view(torch.uint8) for part in parts], 0)
        self._wait(flight, held.device)

    def _send(self, held: Tensor, master: Tensor, plan: Plan) -> tuple[list[Tensor], Flight]:
        """Encode this rank's message of a round, and begin to exchange: (messages by owner, flight)."""
        message = self._messages.next()
        incoming = [held.new_empty(size, dtype=torch.uint8) for size in plan.sizes]
        with self.meter.phase("compress", held.device):
            for piece in plan.pieces[self._rank]:
                key = message_key((self.seed, self.clock.step, _LEVEL, message, self._rank, piece.codec), self._rank)
                out = incoming[self._rank][piece.begin : piece.end]
                difference = self._target(held, master, piece).sub_(_base(held, piece))
                self._codecs[piece.codec].encode(difference, piece.segments, out, key)
        exact = sum(piece.numel for piece in plan.pieces[self._rank]) * held.itemsize
        self.meter.bytes_weights_saved += (exact - incoming[self._rank].numel()) * (len(incoming) - 1)
        return incoming, self._start(incoming, message)

    def _target(self, held: Tensor, master: Tensor, piece: Piece) -> Tensor:
        """Where the weights of `piece` shall go: a new flat fp32 tensor on the device of `held`."""
        first = sum(self._numels[: self._rank])
        segments = [replace(segment, offset=segment.offset - first) for segment in piece.segments]
        target = gather(master, segments).to(held.device)
        return target.to(held.dtype).to(torch.float32) if piece.codec == EXACT else target

    def _start(self, messages: Sequence[Tensor], tag: int) -> Flight:
        """Begin to receive `messages[r]` from every rank r; this rank's own goes to all others."""
        mine = messages[self._rank]
        self.meter.bytes_weights += mine.numel() * (len(messages) - 1)
        with self.meter.phase("communicate", mine.device):
            return start_exchange(self.group, [mine] * len(messages), messages, tag * LEVELS + LEVELS - 1)

    def _wait(self, flight: Flight, device: torch.device) -> None:
        with self.meter.phase("communicate", device):
            flight.finish()

    def _land(self, held: Tensor, plan: Plan, payloads: Sequence[Tensor], flight: Flight) -> None:
        """Wait for the messages of a round, and add them to the weights."""
        self._wait(flight, held.device)
        with self.meter.phase("decompress", held.device):
            for payload, pieces in zip(payloads, plan.pieces, strict=True):
                for piece in pieces:
                    values, encoded = _base(held, piece), payload[piece.begin : piece.end]
                    self._codecs[piece.codec].decode_add([encoded], piece.segments, values, 1.0)
                    scatter(values, piece.segments, held)


def _base(held: Tensor, piece: Piece) -> Tensor:
    """What the message of `piece` is a difference to: a new flat fp32 tensor."""
    if piece.codec == EXACT:
        return torch.zeros(piece.numel, dtype=torch.float32, device=held.device)
    return gather(held, piece.segments)
