"""All-gather of updated weights as compressed differences to the weights that every rank already holds.

Source: the weight differences of Jia et al., "SDP4Bit" (arXiv:2410.15526, section 3.1). The owner of the fp32 master
weights sends C(master - held), and every rank, including the owner, sets held <- round(held + decoded). The next
difference is taken to the new held weights, so it contains whatever the last message left out: this is error feedback
without a residual.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import even_partition
from deepspeed_compress.collectives.exchange import Link
from deepspeed_compress.collectives.messages import MessageLayout, Messages, make_layouts
from deepspeed_compress.collectives.payload import Round
from deepspeed_compress.collectives.reducer import LEVELS, MessageCounter, Run
from deepspeed_compress.compression.codec import Part
from deepspeed_compress.compression.compressors.base import random_key
from deepspeed_compress.compression.kernels.arguments import Keys
from deepspeed_compress.compression.segments import elements

EXACT = 0
"""Channel of uncompressed parameters. It sends the master weights rounded to the dtype of the held weights."""

_LEVEL = -1
"""Key component that keeps these random numbers apart from those of gradients (see `PayloadReducer`)."""

_SMALL_CHUNK, _ROUND_NUMEL = 1 << 20, 1 << 27
"""Elements of a rank that one message has at least, and those of all ranks in a round: their payloads take memory."""


class DifferenceGather:
    """Gather of one flat buffer of weights from the owners of their fp32 master weights to all ranks of `group`.

    Each rank owns a run of the buffer of near-equal length (`even_partition`, the same cut as DeepSpeed's). A buffer is
    sent in rounds of at most `chunk_numel` elements per rank, and the next round is encoded while one is in flight.
    This bounds the work space: two payloads from every rank and a few fp32 [chunk_numel].

    The held weights must have the same bits on all ranks, and do so afterwards: all ranks decode the same payloads onto
    the same weights, with one fp32 sum and one rounding per element. A non-finite master weight spoils the elements
    encoded together with it (its block) on every rank alike, until `synchronise`.

    Args:
        group: ranks that hold the buffer.
        sizes: (name, numel) of the parameters in the order of the buffer. Padding is included under any name.
        messages: the messages. Channel `EXACT` sends elements in the dtype of the buffer: fp32, bf16 or fp16. No
            channel has feedback.
        run: state of the run.
        chunk_numel: maximum number of elements per rank and round; None for that of `run`, within limits of memory.
        order: rank of each parameter in the sending order, smallest first. Parameters that it lacks are sent last. If
            empty, the order is that of the buffer.
    """

    def __init__(
        self,
        group: ProcessGroup,
        sizes: Sequence[tuple[str, int]],
        messages: Messages,
        run: Run,
        chunk_numel: int | None = None,
        order: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.group = group
        self.messages = messages
        self.run = run
        self._chunk = chunk_numel or min(run.chunk_numel, max(_SMALL_CHUNK, _ROUND_NUMEL // group.size()))
        self._counter = MessageCounter(run.clock)
        self._rank: int = group.rank()
        partition = even_partition(sizes, group.size())
        parts = [partition.owned_by(rank) for rank in range(group.size())]
        ordered = [sorted(part, key=lambda one: order.get(one.parameter, len(order))) for part in parts]
        self._numels = [sum(segment.numel for segment in part) for part in parts]
        # The largest share determines the number of rounds, because a rank sends its share.
        rounds = -(-max(self._numels) // self._chunk)
        self._layouts = make_layouts(messages, ordered, self._rank, rounds)

    @property
    def numel(self) -> int:
        """Return the number of elements of the buffer."""
        return sum(self._numels)

    @property
    def own_numel(self) -> int:
        """Return the number of elements whose master weights this rank owns."""
        return self._numels[self._rank]

    @property
    def rounds(self) -> int:
        """Return the number of messages that a rank sends in one `gather`."""
        return len(self._layouts)

    def last_rounds(self) -> dict[str, int]:
        """Return the last round that contains any part of each parameter, by name."""
        return {
            segment.parameter: number
            for number, layout in enumerate(self._layouts)
            for pieces in layout.owners
            for piece in pieces
            for segment in piece.segments
        }

    def own(self, held: Tensor) -> Tensor:
        """Return the part of `held` whose master weights this rank owns, as a view."""
        return torch.split(held, self._numels)[self._rank]

    @torch.no_grad()
    def gather(self, held: Tensor, master: Tensor) -> None:
        """Move the weights of all ranks towards their master weights.

        Args:
            held: the flat buffer, updated in place. This rank's own part must also equal that of the other ranks.
            master: flat master weights of `own(held)`, of any floating dtype and on any device; not changed.
        """
        in_flight: deque[Round] = deque()
        for layout in self._layouts:
            in_flight.append(self._send(held, master, layout))
            if len(in_flight) > 1:
                self.take(held, in_flight.popleft())
        while in_flight:
            self.take(held, in_flight.popleft())

    @torch.no_grad()
    def begin(self, held: Tensor, master: Tensor, first_tag: int = 0) -> "PendingWeights":
        """Start a `gather` by sending all messages now.

        While the rounds are waited for, `held` becomes bit for bit what `gather` would make it. It must not change
        before that; `master` may change at once.

        Args:
            held: see `gather`.
            master: see `gather`.
            first_tag: first of `rounds` message numbers. Gathers in progress at the same time need distinct numbers.
        """
        sent = [self._send(held, master, layout, first_tag) for layout in self._layouts]
        return PendingWeights(self, held, deque(sent))

    @torch.no_grad()
    def synchronise(self, held: Tensor, master: Tensor) -> None:
        """Replace the weights of all ranks by their rounded master weights, uncompressed. See `gather`."""
        parts = torch.split(held, self._numels)
        parts[self._rank].copy_(master)
        # In pieces, because they are copied. They are not numbered: random numbers must not depend on how often weights
        # were saved.
        for begin in range(0, max(self._numels), self._chunk):
            pieces = [part[begin : begin + self._chunk].view(torch.uint8) for part in parts]
            messages, sizes = torch.cat(pieces), [piece.numel() for piece in pieces]
            with self.run.sending("bytes_weights", sizes[self._rank] * (len(sizes) - 1), held.device):
                Link(self.group).all_gather_split(messages, sizes, LEVELS - 1).finish()
            for piece, message in zip(pieces, torch.split(messages, sizes), strict=True):
                piece.copy_(message)

    def _send(self, held: Tensor, master: Tensor, layout: MessageLayout, first_tag: int = 0) -> Round:
        """Encode this rank's message of a round and start the exchange."""
        number, meter, run = self._counter.next(), self.run.meter, self.run
        sizes = layout.sizes
        messages = held.new_empty(sum(sizes), dtype=torch.uint8)
        mine, keys = messages[layout.place], Keys(random_key(run.seed, run.clock.step, _LEVEL, number), self._rank)
        with meter.phase("compress", held.device):
            for piece in layout.pieces:
                codec, key = self.messages.channels[piece.channel].codec, keys.of(self._rank, piece.channel)
                difference = self._difference(held, master, piece)
                codec.encode(difference, piece.segments, mine[piece.begin : piece.end], key)
        exact = layout.numel * held.itemsize
        meter.count("bytes_weights_saved", (exact - layout.size) * (len(sizes) - 1))
        with run.sending("bytes_weights", layout.size * (len(sizes) - 1), held.device):
            tag = (first_tag + number) * LEVELS + LEVELS - 1
            exchange = Link(self.group).all_gather_split(messages, sizes, tag)
        return Round(layout, number, messages, messages, exchange)

    def _difference(self, held: Tensor, master: Tensor, piece: Part) -> Tensor:
        """Return what the message of `piece` holds: flat fp32 on the device of `held`, possibly a view of `master`."""
        first = sum(self._numels[: self._rank])
        segments = [replace(segment, offset=segment.offset - first) for segment in piece.segments]
        target = elements(master, segments).to(held.device)
        if piece.channel == EXACT:
            return target.to(held.dtype).to(torch.float32)
        return target - elements(held, piece.segments)

    def take(self, held: Tensor, sent: Round) -> None:
        """Wait for the messages of a round and add them to the weights."""
        with self.run.meter.phase("communicate", held.device):
            sent.exchange.finish()
        with self.run.meter.phase("decompress", held.device):
            for index, batch in (*sent.layout.gathered_own, *sent.layout.gathered):
                codec, is_exact = self.messages.channels[index].codec, index == EXACT
                x, at = batch.place(held) if is_exact else batch.read(held, flat=not codec.is_plain)
                codec.decode_all(sent.incoming, batch, x, at, add=not is_exact)
                if x is not held:
                    batch.scatter(x, held)


@dataclass(frozen=True)
class PendingWeights:
    """Handle of a gather into `held` that `DifferenceGather.begin` started."""

    source: DifferenceGather
    held: Tensor
    rounds: deque[Round]
    """Rounds that have not been waited for."""

    @torch.no_grad()
    def wait_for(self, last: int) -> None:
        """Block until the rounds up to number `last` are added to the weights."""
        while self.source.rounds - len(self.rounds) <= last and self.rounds:
            self.source.take(self.held, self.rounds.popleft())

    def finish(self) -> None:
        """Block until all rounds are added to the weights."""
        self.wait_for(self.source.rounds)
