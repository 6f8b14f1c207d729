"""Compressed reduce-scatter, all-gather and all-reduce of a flat bucket: one packed message an owner, fp32 sums."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import LAYOUTS, Partition
from deepspeed_compress.communication.contracts import (
    LEVELS,
    Delivery,
    Landing,
    Memory,
    Messages,
    Meter,
    Pending,
    StepClock,
    reduce_at_once,
)
from deepspeed_compress.communication.exchange import Flight, start_exchange
from deepspeed_compress.communication.plan import CodecOf, Piece, Plan, make_plans
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors.base import message_key
from deepspeed_compress.compression.segments import Segment, elements, gather, scatter

__all__ = ["PayloadReducer"]


@dataclass(frozen=True)
class _Round:
    """Messages under way, held until they have arrived."""

    number: int
    outgoing: Sequence[Tensor]
    incoming: Sequence[Tensor]
    flight: Flight


@dataclass(frozen=True)
class _Started:
    """See `Pending`. `scale` of `reducer`'s `rounds`, whose layouts are `plans`."""

    reducer: "PayloadReducer"
    plans: Sequence[Plan]
    rounds: Sequence[_Round]
    scale: float

    @property
    def own(self) -> list[Segment]:
        rank = self.reducer.group.rank()
        return [segment for plan in self.plans for piece in plan.pieces[rank] for segment in piece.segments]

    def finish(self, local: Tensor) -> Tensor:
        sizes = [plan.numels[self.reducer.group.rank()] for plan in self.plans]
        parts = zip(torch.split(local, sizes), self.rounds, self.plans, strict=True)
        sums = [self.reducer.sum(part, sent, plan, self.scale, deliver=True) for part, sent, plan in parts]
        return torch.cat(sums)


CodecsAt = Callable[[int], tuple[Codec, ...]]
"""Optimizer step to the codecs in force, by their indices."""


class PayloadReducer:
    """Reduces buckets over `group`.

    `codecs_at` gives the codecs of a step, `codec_of` the index of a parameter's codec. `memories` has one entry a
    codec for the gradients that this rank sends, `mean_memories` for the means that it owns and sends back in
    `all_reduce`. A rank's own elements never travel. A bucket goes in rounds of at most `chunk_numel` elements of it:
    while one travels the next is compressed. `deliveries` has, by codec, what takes sums that are not handed on as they
    arrive. `level` tells the messages and random numbers of several reducers of one run apart, `sender` those of the
    ranks, when the rank in `group` does not. `traffic`: the kind of bytes in the meter. `downward`: see
    `start_exchange`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        codecs_at: CodecsAt,
        memories: Sequence[Memory],
        mean_memories: Sequence[Memory],
        codec_of: CodecOf,
        clock: StepClock,
        meter: Meter,
        seed: int = 0,
        chunk_numel: int | None = None,
        deliveries: Mapping[int, Delivery] = MappingProxyType({}),
        level: int = 0,
        sender: int | None = None,
        traffic: str = "bytes_sent",
        downward: ProcessGroup | None = None,
    ) -> None:
        assert 0 <= level < LEVELS, f"level {level}"
        self.group = group
        self.codecs_at = codecs_at
        self.memories = tuple(memories)
        self.mean_memories = tuple(mean_memories)
        self.codec_of = codec_of
        self.clock = clock
        self.meter = meter
        self.seed = seed
        self.chunk_numel = chunk_numel
        self.deliveries = deliveries
        self.level = level
        self.traffic = traffic
        self.downward = downward
        self._messages = Messages(clock)
        self._sender = group.rank() if sender is None else sender
        self._rank: int = group.rank()
        # Not a method of this object: a cycle would keep the process group until the garbage is collected.
        self._planned = lru_cache(maxsize=LAYOUTS)(partial(_make_plans, codec_of, chunk_numel))

    def plans(self, partition: Partition) -> tuple[Plan, ...]:
        """The message layouts of this step for `partition`, one a round."""
        return self._planned(partition, self.codecs_at(self.clock.step))

    def start_reduce_scatter(
        self, bucket: Tensor, partition: Partition, scale: float, number: int | None = None
    ) -> Pending:
        """See `Reducer`. `bucket`: flat fp32, bf16 or fp16 [partition.numel].

        `number`: of the first message, one a round; None takes the next ones. Numbers that are given are not counted:
        see `skip_messages`.
        """
        assert bucket.numel() == partition.numel, f"bucket of {bucket.numel()} for a partition of {partition.numel}"
        if self.group.size() == 1:
            return reduce_at_once(self, bucket, partition, scale)
        plans = self.plans(partition)
        numbers = [self._messages.next() for _ in plans] if number is None else range(number, number + len(plans))
        rounds = [self._send_parts(bucket, plan, one) for plan, one in zip(plans, numbers, strict=True)]
        return _Started(self, plans, rounds, scale)

    def skip_messages(self, count: int) -> None:
        """As if this step had sent `count` messages more."""
        self._messages.skip(count)

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """This rank's own segments of `bucket` become `scale` times the sum over the ranks; others keep their values.

        `bucket`: flat fp32, bf16 or fp16 [partition.numel]. Sums are fp32, in the same order in every run.
        """
        if self.group.size() == 1:
            _scale_alone(bucket, scale)
            return
        pending = self.start_reduce_scatter(bucket, partition, scale)
        scatter(pending.finish(gather(bucket, pending.own)), pending.own, bucket)

    def all_gather(self, bucket: Tensor, partition: Partition) -> None:
        """Every segment of `bucket` becomes what its owner has there, as its message says: the same bits everywhere."""
        self.start_all_gather(bucket, partition)()

    def start_all_gather(self, bucket: Tensor, partition: Partition) -> Landing:
        """Begin an `all_gather`; `bucket` is written when it lands."""
        plans = self.plans(partition)
        if self.traffic == "bytes_weights":
            exact = sum(segment.numel for segment in partition.owned_by(self._rank)) * bucket.itemsize
            sent = sum(plan.sizes[self._rank] for plan in plans)
            self.meter.count("bytes_weights_saved", (exact - sent) * (self.group.size() - 1))
        return self._gather(bucket, plans, (_gather_pieces(bucket, plan.pieces[self._rank]) for plan in plans))

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """All of `bucket` becomes `scale` times the sum over the ranks, the same bits on every rank.

        Each owner encodes its mean again, with a memory of its own (the two-sided scheme of 1-bit Adam,
        arXiv:2102.02888, algorithm 1), and decodes it as the others do.
        """
        if self.group.size() == 1:
            _scale_alone(bucket, scale)
            return
        assert bucket.numel() == partition.numel, f"bucket of {bucket.numel()} for a partition of {partition.numel}"
        plans = self.plans(partition)
        rounds = [self._send_parts(bucket, plan, self._messages.next()) for plan in plans]
        # One by one: the mean of a round is on its way before the parts of the next are waited for.
        sums = (
            self.sum(_gather_pieces(bucket, plan.pieces[self._rank]), sent, plan, scale, deliver=False)
            for sent, plan in zip(rounds, plans, strict=True)
        )
        self._gather(bucket, plans, sums)()

    def _delivered(self, total: Tensor, piece: Piece) -> Tensor:
        delivery = self.deliveries.get(piece.codec)
        return total if delivery is None else delivery.deliver(total, piece.segments, self.clock.step)

    def _send_parts(self, bucket: Tensor, plan: Plan, message: int) -> _Round:
        """Encode this rank's part of every other owner's elements, and begin to exchange."""
        ranks = range(len(plan.sizes))
        with self.meter.phase("compress", bucket.device):
            outgoing = [
                self._encode(bucket, plan, owner, message) if owner != self._rank else _room(bucket.device)
                for owner in ranks
            ]
        incoming = [_room(bucket.device, plan.sizes[self._rank] if owner != self._rank else 0) for owner in ranks]
        return self._start(message, outgoing, incoming)

    def _gather(self, bucket: Tensor, plans: Sequence[Plan], totals: Iterable[Tensor]) -> Landing:
        """Send `totals`, this rank's elements by plan, to all; it lands by writing all owners' into `bucket`."""
        rounds = [self._send_totals(total, plan) for plan, total in zip(plans, totals, strict=True)]
        return partial(self._land, bucket, plans, rounds)

    def _land(self, bucket: Tensor, plans: Sequence[Plan], rounds: Sequence[_Round]) -> None:
        for plan, sent in zip(plans, rounds, strict=True):
            for owner, pieces in enumerate(plan.pieces):
                payload = self._arrived(sent, owner)
                with self.meter.phase("decompress", bucket.device):
                    for piece in pieces:
                        total = torch.zeros(piece.numel, dtype=torch.float32, device=bucket.device)
                        self._decode([payload], piece, total, 1.0)
                        scatter(self._delivered(total, piece), piece.segments, bucket)
            sent.flight.finish()

    def _send_totals(self, total: Tensor, plan: Plan) -> _Round:
        message = self._messages.next()
        with self.meter.phase("compress", total.device):
            mine = _room(total.device, plan.sizes[self._rank])
            for piece in plan.pieces[self._rank]:
                # Not the sender's number: what an owner sends back is the same on every node.
                key = self._key(message, self._rank, piece, self._rank)
                self._encode_piece(_part(total, piece), piece, mine, self.mean_memories, key)
        incoming = [_room(total.device, size) for size in plan.sizes]
        incoming[self._rank] = mine
        return self._start(message, [mine] * len(incoming), incoming)

    def _encode(self, bucket: Tensor, plan: Plan, owner: int, message: int) -> Tensor:
        """The packed message of the elements of `owner`."""
        payload = _room(bucket.device, plan.sizes[owner])
        for piece in plan.pieces[owner]:
            key = self._key(message, owner, piece, self._sender)
            self._encode_piece(elements(bucket, piece.segments), piece, payload, self.memories, key)
        return payload

    def _encode_piece(self, x: Tensor, piece: Piece, payload: Tensor, memories: Sequence[Memory], key: int) -> None:
        out, codec = payload[piece.begin : piece.end], self.codecs_at(self.clock.step)[piece.codec]
        memories[piece.codec].encode(x, piece.segments, out, key, codec)

    def _key(self, message: int, owner: int, piece: Piece, sender: int) -> int:
        return message_key((self.seed, self.clock.step, self.level, message, owner, piece.codec), sender)

    def _start(self, message: int, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> _Round:
        size = sum(part.numel() for peer, part in enumerate(outgoing) if peer != self._rank)
        self.meter.count(self.traffic, size)
        with self.meter.phase("communicate", incoming[0].device):
            # Messages of several reducers may be under way in one group.
            tag = message * LEVELS + self.level
            flight = start_exchange(self.group, outgoing, incoming, tag, self.downward)
        return _Round(message, outgoing, incoming, flight)

    def _arrived(self, sent: _Round, source: int) -> Tensor:
        """The message of rank `source`, when it is here."""
        with self.meter.phase("communicate", sent.incoming[source].device):
            sent.flight.wait_for(source)
        return sent.incoming[source]

    def sum(self, local: Tensor, sent: _Round, plan: Plan, scale: float, deliver: bool) -> Tensor:
        """`scale` times the sum of this rank's elements of a round, fp32: `local`, piece after piece, overwritten.

        Messages are added in the order of ranks. `deliver`: the sums are for the optimizer.
        """
        others = [source for source in range(len(plan.sizes)) if source != self._rank]
        payloads = [self._arrived(sent, source) for source in others]
        with self.meter.phase("decompress", local.device):
            for piece in plan.pieces[self._rank]:
                total = self._sum_piece(_part(local, piece), payloads, piece, sent.number, scale)
                _part(local, piece).copy_(self._delivered(total, piece) if deliver else total)
        sent.flight.finish()
        return local

    def _sum_piece(self, own: Tensor, payloads: Sequence[Tensor], piece: Piece, message: int, scale: float) -> Tensor:
        memory, codec = self.memories[piece.codec], self.codecs_at(self.clock.step)[piece.codec]
        exact = memory.keep(own, piece.segments, codec)
        if exact is not None:
            self._decode(payloads, piece, exact.mul_(scale), scale)
            return exact
        mine = _room(own.device, piece.end)
        self._encode_piece(own, piece, mine, self.memories, self._key(message, self._rank, piece, self._sender))
        total = torch.zeros_like(own)
        self._decode([mine, *payloads], piece, total, scale)
        return total

    def _decode(self, payloads: Iterable[Tensor], piece: Piece, total: Tensor, scale: float) -> None:
        """`total` (fp32 [piece.numel]) += `scale` times the sum of one piece over messages."""
        codec = self.codecs_at(self.clock.step)[piece.codec]
        codec.decode_add([payload[piece.begin : piece.end] for payload in payloads], piece.segments, total, scale)


def _make_plans(
    codec_of: CodecOf, chunk_numel: int | None, partition: Partition, codecs: tuple[Codec, ...]
) -> tuple[Plan, ...]:
    chunks = -(-partition.numel // chunk_numel) if chunk_numel else 1
    return make_plans(partition, codecs, codec_of, max(1, chunks))


def _scale_alone(bucket: Tensor, scale: float) -> None:
    """The sum over one rank: nothing travels, so nothing is encoded or remembered."""
    bucket.copy_(bucket.to(torch.float32) * scale)


def _part(flat: Tensor, piece: Piece) -> Tensor:
    return flat[piece.first : piece.first + piece.numel]


def _gather_pieces(bucket: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """The elements of one owner in the order of its pieces: a new flat fp32 tensor."""
    return gather(bucket, [segment for piece in pieces for segment in piece.segments])


def _room(device: torch.device, size: int = 0) -> Tensor:
    """Room for a message of `size` bytes."""
    return torch.empty(size, dtype=torch.uint8, device=device)
