"""All-gather of updated weights as compressed differences to the weights that every rank already holds.

Source: the weight differences of Jia et al., "SDP4Bit" (arXiv:2410.15526, section 3.1). The owner of the master weights
sends C(master - held), and every rank, the owner too, makes held <- round(held + decoded). The next difference is taken
to the new held weights, so what one message left out is in the next one: error feedback without a residual.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import even_partition
from deepspeed_compress.communication.exchange import Link, PendingExchange
from deepspeed_compress.communication.messages import MessageLayout, Messages, Piece, layouts_of_parts
from deepspeed_compress.communication.reducer import LEVELS, MessageCounter, Run
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors.base import message_key
from deepspeed_compress.compression.segments import elements, scatter, stretch

__all__ = ["CHUNK_NUMEL", "EXACT", "DifferenceGather", "PendingWeights"]

EXACT = 0
"""Channel of the parameters that are not compressed: the master travels, rounded to the type of the held weights."""

_LEVEL = -1
"""Tells its random numbers from those of gradients (see `PayloadReducer`)."""

CHUNK_NUMEL = 1 << 20
"""Elements that a rank sends in one message: few enough to stay in a cache from one pass to the next."""


@dataclass(frozen=True)
class _Round:
    """Messages under way, by owner."""

    layout: MessageLayout
    messages: Sequence[Tensor]
    exchange: PendingExchange


class DifferenceGather:
    """Brings new weights from the ranks that own their masters to all ranks of `group`: one flat buffer, every step.

    `sizes`: (name, numel) of the parameters in the order of the buffer, padding included under any name. The ranks own
    near-equal runs of it (`even_partition`, which is DeepSpeed's cut). The channel `EXACT` of `messages` sends elements
    in the type of the buffer: fp32, bf16 or fp16. No channel has feedback.

    What all ranks hold must be the same bits, and is so afterwards: all decode the same payloads onto the same weights,
    with one fp32 sum and one rounding an element. A master that is not finite spoils what is encoded together with it
    (its block), on every rank alike and until `synchronise`.

    `order`: where the parameters stand in a rank's messages, the first ones first; those that it does not have come
    last. Empty is the order of the buffer.

    A buffer goes in rounds of at most `chunk_numel` elements a rank; the next one is encoded while one travels. That
    bounds the work space: two payloads from every rank, and a few fp32 [chunk_numel].
    """

    def __init__(
        self,
        group: ProcessGroup,
        sizes: Sequence[tuple[str, int]],
        messages: Messages,
        run: Run,
        chunk_numel: int = CHUNK_NUMEL,
        order: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.group = group
        self.messages = messages
        self.run = run
        self._counter = MessageCounter(run.clock)
        self._rank: int = group.rank()
        partition = even_partition(sizes, group.size())
        parts = [partition.owned_by(rank) for rank in range(group.size())]
        travelling = [sorted(part, key=lambda one: order.get(one.parameter, len(order))) for part in parts]
        self._numels = [sum(segment.numel for segment in part) for part in parts]
        # Rounds are counted by the largest share, which is what a rank sends.
        rounds = -(-max(self._numels) // chunk_numel)
        self._layouts = layouts_of_parts(messages, travelling, rounds)

    @property
    def numel(self) -> int:
        """Elements of the buffer."""
        return sum(self._numels)

    @property
    def own_numel(self) -> int:
        """Those that this rank has the masters of."""
        return self._numels[self._rank]

    @property
    def rounds(self) -> int:
        """Messages that a rank sends in one `gather`."""
        return len(self._layouts)

    def last_rounds(self) -> dict[str, int]:
        """By parameter, the last round that brings some of it."""
        return {
            segment.parameter: number
            for number, layout in enumerate(self._layouts)
            for pieces in layout.pieces
            for piece in pieces
            for segment in piece.segments
        }

    def own(self, held: Tensor) -> Tensor:
        """The part of `held` that this rank has the masters of: a view."""
        return torch.split(held, self._numels)[self._rank]

    @torch.no_grad()
    def gather(self, held: Tensor, master: Tensor) -> None:
        """Move the weights of all ranks towards their masters.

        `held`: the flat buffer, updated in place; this rank's own part too must be as the others have it. `master`:
        flat, the masters of `own(held)`, of any floating type and on any device; not changed.
        """
        under_way: deque[_Round] = deque()
        for layout in self._layouts:
            under_way.append(self._send(held, master, layout))
            if len(under_way) > 1:
                self.take(held, under_way.popleft())
        while under_way:
            self.take(held, under_way.popleft())

    @torch.no_grad()
    def begin(self, held: Tensor, master: Tensor, first_tag: int = 0) -> "PendingWeights":
        """Begin what `gather` does: all messages leave now. `held` becomes what it is after `gather`, to the bit, round
        by round as they are waited for; nobody may change it before, `master` may change at once.

        `first_tag`: messages of several gathers that are under way at once need numbers of their own: those from
        `first_tag` on, as many as `rounds`.
        """
        sent = [self._send(held, master, layout, first_tag) for layout in self._layouts]
        return PendingWeights(self, held, deque(sent))

    @torch.no_grad()
    def synchronise(self, held: Tensor, master: Tensor) -> None:
        """The weights of all ranks become their masters, rounded: uncompressed. Arguments as of `gather`."""
        parts = torch.split(held, self._numels)
        parts[self._rank].copy_(master)
        # It has no number: random numbers must not depend on how often weights were saved.
        exchange = self._start([part.view(torch.uint8) for part in parts], 0)
        self._wait(exchange, held.device)

    def _send(self, held: Tensor, master: Tensor, layout: MessageLayout, first_tag: int = 0) -> _Round:
        """Encode this rank's message of a round, and begin to exchange."""
        number, meter, rank = self._counter.next(), self.run.meter, self._rank
        messages = [held.new_empty(size, dtype=torch.uint8) for size in layout.sizes]
        with meter.phase("compress", held.device):
            for piece in layout.pieces[rank]:
                key = message_key((self.run.seed, self.run.clock.step, _LEVEL, number, rank, piece.channel), rank)
                difference = self._target(held, master, piece) - _base(held, piece)
                out = messages[rank][piece.begin : piece.end]
                self._codec(piece).encode(difference, piece.segments, out, key)
        exact = sum(piece.numel for piece in layout.pieces[rank]) * held.itemsize
        meter.count("bytes_weights_saved", (exact - messages[rank].numel()) * (len(messages) - 1))
        return _Round(layout, messages, self._start(messages, first_tag + number))

    def _codec(self, piece: Piece) -> Codec:
        return self.messages.channels[piece.channel].codec

    def _target(self, held: Tensor, master: Tensor, piece: Piece) -> Tensor:
        """Where the weights of `piece` shall go: flat fp32 on the device of `held`, perhaps a view of `master`."""
        first = sum(self._numels[: self._rank])
        segments = [replace(segment, offset=segment.offset - first) for segment in piece.segments]
        target = elements(master, segments).to(held.device)
        return target.to(held.dtype).to(torch.float32) if piece.channel == EXACT else target

    def _start(self, messages: Sequence[Tensor], number: int) -> PendingExchange:
        """Begin to receive `messages[r]` from every rank r; this rank's own goes to all others."""
        mine = messages[self._rank]
        size = mine.numel() * (len(messages) - 1)
        self.run.meter.count("bytes_weights", size)
        with self.run.meter.phase("communicate", mine.device):
            self.run.wait_to_send(size)
            return Link(self.group).start([mine] * len(messages), messages, number * LEVELS + LEVELS - 1)

    def _wait(self, exchange: PendingExchange, device: torch.device) -> None:
        with self.run.meter.phase("communicate", device):
            exchange.finish()

    def take(self, held: Tensor, sent: _Round) -> None:
        """Wait for the messages of a round, and add them to the weights."""
        self._wait(sent.exchange, held.device)
        with self.run.meter.phase("decompress", held.device):
            for payload, pieces in zip(sent.messages, sent.layout.pieces, strict=True):
                for piece in pieces:
                    place = None if piece.channel == EXACT else stretch(held, piece.segments)
                    values, encoded = _base(held, piece) if place is None else place, payload[piece.begin : piece.end]
                    self._codec(piece).decode_add([encoded], piece.segments, values, 1.0)
                    if place is None:
                        scatter(values, piece.segments, held)


@dataclass(frozen=True)
class PendingWeights:
    """Weights under way to `held`, by `DifferenceGather.begin`."""

    source: DifferenceGather
    held: Tensor
    rounds: deque[_Round]
    """Those that have not been waited for."""

    @torch.no_grad()
    def wait_for(self, last: int) -> None:
        """Until the rounds up to number `last` are in the weights."""
        while self.source.rounds - len(self.rounds) <= last and self.rounds:
            self.source.take(self.held, self.rounds.popleft())

    def finish(self) -> None:
        """Until all are."""
        self.wait_for(self.source.rounds)


def _base(held: Tensor, piece: Piece) -> Tensor:
    """What the message of `piece` is a difference to: flat fp32, perhaps a view of `held`."""
    if piece.channel == EXACT:
        return torch.zeros(piece.numel, dtype=torch.float32, device=held.device)
    return elements(held, piece.segments)
