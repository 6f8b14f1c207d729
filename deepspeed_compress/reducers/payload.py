"""Compressed reduce-scatter, all-gather and all-reduce of a flat bucket: one packed message an owner, fp32 sums."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.buckets import Partition, Segment, gather, scatter
from deepspeed_compress.codec import Codec
from deepspeed_compress.compressors.base import message_key
from deepspeed_compress.reducers.exchange import Flight, start_exchange
from deepspeed_compress.reducers.plan import CodecOf, Piece, Plan, make_plans

__all__ = ["Delivery", "Memory", "Messages", "Meter", "PayloadReducer", "Reducer", "StepClock"]


class Reducer(Protocol):
    """Sums buckets over the ranks of `group`, each segment for its owner or for all."""

    @property
    def group(self) -> ProcessGroup: ...

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None: ...

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None: ...


class Memory(Protocol):
    """What a sender keeps between messages (`feedback` has the kinds)."""

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int, codec: Codec) -> None: ...

    def keep(self, x: Tensor, segments: Sequence[Segment], key: int, codec: Codec) -> Tensor: ...


class Delivery(Protocol):
    """What is handed on of a sum that arrived (`feedback.Spread`)."""

    def deliver(self, total: Tensor, segments: Sequence[Segment], step: int) -> Tensor: ...


class Meter(Protocol):
    """Where bytes and times are counted (`monitor.Meter`)."""

    bytes_sent: int

    def phase(self, name: str, device: torch.device) -> AbstractContextManager[None]: ...


@dataclass
class StepClock:
    """Where the run is: `step` counts optimizer steps, `begun` those that this process has begun.

    `loss_scale` is the factor that the gradients of this step carry.
    """

    step: int = 0
    loss_scale: float = 1.0
    begun: int = 0

    def begin(self, step: int, loss_scale: float = 1.0) -> None:
        self.step, self.loss_scale, self.begun = step, loss_scale, self.begun + 1


@dataclass
class Messages:
    """Numbers the messages of one group within a step: 1, 2, 3 ... The ranks of the group number them alike.

    Every reducer has its own, because ranks of one group may take part in different numbers of others.
    """

    clock: StepClock
    _begun: int = -1
    _number: int = 0

    def next(self) -> int:
        self._number = self._number + 1 if self._begun == self.clock.begun else 1
        self._begun = self.clock.begun
        return self._number


@dataclass(frozen=True)
class _Round:
    """Messages under way, held until `flight` has waited for them."""

    number: int
    outgoing: Sequence[Tensor]
    incoming: Sequence[Tensor]
    flight: Flight


CodecsAt = Callable[[int], tuple[Codec, ...]]
"""Optimizer step to the codecs in force, by their indices."""


class PayloadReducer:
    """Reduces buckets over `group`.

    `codecs_at` gives the codecs of a step, `codec_of` the index of a parameter's codec. `memories` has one entry a
    codec for the gradients that this rank sends, `mean_memories` for the means that it owns and sends back in
    `all_reduce`. A rank's own elements never travel. A bucket goes in rounds of at most `chunk_numel` elements of it:
    while one travels the next is compressed. `deliveries` has, by codec, what takes sums that are not handed on as they
    arrive. `level` tells the random numbers of several reducers of one run apart; `sender` those of the ranks, when the
    rank in `group` does not.
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
    ) -> None:
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
        self._messages = Messages(clock)
        self._sender = group.rank() if sender is None else sender
        self._rank: int = group.rank()
        # Not a method of this object: a cycle would keep the process group until the garbage is collected.
        self._planned = lru_cache(maxsize=4096)(partial(_make_plans, codec_of, chunk_numel))

    def plans(self, partition: Partition) -> tuple[Plan, ...]:
        """The message layouts of this step for `partition`, one a round."""
        return self._planned(partition, self.codecs_at(self.clock.step))

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """This rank's own segments of `bucket` become `scale` times the sum over the ranks; others keep their values.

        `bucket`: flat fp32, bf16 or fp16 [partition.numel]. Sums are fp32, in the same order in every run.
        """
        if self.group.size() == 1:
            _scale_alone(bucket, scale)
            return
        plans = self.plans(partition)
        for plan, total in zip(plans, self._reduce(bucket, partition, plans, scale), strict=True):
            self._put_own(total, plan, bucket)

    def all_gather(self, bucket: Tensor, partition: Partition) -> None:
        """Every segment of `bucket` becomes what its owner has there, as its message says: the same bits everywhere."""
        plans = self.plans(partition)
        self._gather(bucket, plans, [_gather_pieces(bucket, plan.pieces[self._rank]) for plan in plans])

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """All of `bucket` becomes `scale` times the sum over the ranks, the same bits on every rank.

        Each owner encodes its mean again, with a memory of its own (the two-sided scheme of 1-bit Adam,
        arXiv:2102.02888, algorithm 1), and decodes it as the others do.
        """
        if self.group.size() == 1:
            _scale_alone(bucket, scale)
            return
        plans = self.plans(partition)
        self._gather(bucket, plans, self._reduce(bucket, partition, plans, scale))

    def _put_own(self, total: Tensor, plan: Plan, bucket: Tensor) -> None:
        for piece in plan.pieces[self._rank]:
            scatter(self._delivered(_part(total, piece), piece), piece.segments, bucket)

    def _delivered(self, total: Tensor, piece: Piece) -> Tensor:
        delivery = self.deliveries.get(piece.codec)
        return total if delivery is None else delivery.deliver(total, piece.segments, self.clock.step)

    def _reduce(self, bucket: Tensor, partition: Partition, plans: Sequence[Plan], scale: float) -> list[Tensor]:
        """`scale` times the sum of this rank's elements, fp32, piece after piece of each plan."""
        assert bucket.numel() == partition.numel, f"bucket of {bucket.numel()} for a partition of {partition.numel}"
        rounds = [self._send_parts(bucket, plan) for plan in plans]
        return [self._sum(bucket, sent, plan, scale) for sent, plan in zip(rounds, plans, strict=True)]

    def _send_parts(self, bucket: Tensor, plan: Plan) -> _Round:
        """Encode this rank's part of every other owner's elements, and begin to exchange."""
        message, ranks = self._messages.next(), range(len(plan.sizes))
        with self.meter.phase("compress", bucket.device):
            outgoing = [
                self._encode(
                    _gather_pieces(bucket, plan.pieces[owner]), plan, owner, self.memories, message, self._sender
                )
                if owner != self._rank
                else bucket.new_empty(0, dtype=torch.uint8)
                for owner in ranks
            ]
        incoming = [bucket.new_empty(plan.sizes[self._rank], dtype=torch.uint8) for _ in ranks]
        return self._start(message, outgoing, incoming)

    def _gather(self, bucket: Tensor, plans: Sequence[Plan], totals: Sequence[Tensor]) -> None:
        """Send `totals`, this rank's elements by plan, to all, and write what every owner sends into `bucket`."""
        rounds = [self._send_totals(total, plan) for plan, total in zip(plans, totals, strict=True)]
        for plan, sent in zip(plans, rounds, strict=True):
            payloads = self._arrived(sent)
            with self.meter.phase("decompress", bucket.device):
                for payload, pieces in zip(payloads, plan.pieces, strict=True):
                    for piece in pieces:
                        total = self._decoded([payload], piece, 1.0, bucket.device)
                        scatter(self._delivered(total, piece), piece.segments, bucket)

    def _send_totals(self, total: Tensor, plan: Plan) -> _Round:
        message = self._messages.next()
        with self.meter.phase("compress", total.device):
            # Not the sender's number: what an owner sends back is the same on every node.
            mine = self._encode(total, plan, self._rank, self.mean_memories, message, self._rank)
        incoming = [total.new_empty(size, dtype=torch.uint8) for size in plan.sizes]
        incoming[self._rank] = mine
        return self._start(message, [mine] * len(incoming), incoming)

    def _encode(
        self, flat: Tensor, plan: Plan, owner: int, memories: Sequence[Memory], message: int, sender: int
    ) -> Tensor:
        """The packed message of the elements of `owner`, `flat` (fp32; used as work space)."""
        payload = torch.empty(plan.sizes[owner], dtype=torch.uint8, device=flat.device)
        codecs = self.codecs_at(self.clock.step)
        for piece in plan.pieces[owner]:
            out, key = payload[piece.begin : piece.end], self._key(message, owner, piece, sender)
            memories[piece.codec].encode(_part(flat, piece), piece.segments, out, key, codecs[piece.codec])
        return payload

    def _key(self, message: int, owner: int, piece: Piece, sender: int) -> int:
        return message_key((self.seed, self.clock.step, self.level, message, owner, piece.codec), sender)

    def _start(self, message: int, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> _Round:
        self.meter.bytes_sent += sum(part.numel() for peer, part in enumerate(outgoing) if peer != self._rank)
        with self.meter.phase("communicate", incoming[0].device):
            return _Round(message, outgoing, incoming, start_exchange(self.group, outgoing, incoming, message))

    def _arrived(self, sent: _Round) -> Sequence[Tensor]:
        with self.meter.phase("communicate", sent.incoming[0].device):
            sent.flight()
        return sent.incoming

    def _sum(self, bucket: Tensor, sent: _Round, plan: Plan, scale: float) -> Tensor:
        incoming, pieces, codecs = self._arrived(sent), plan.pieces[self._rank], self.codecs_at(self.clock.step)
        with self.meter.phase("decompress", bucket.device):
            total = _gather_pieces(bucket, pieces)
            others = [payload for source, payload in enumerate(incoming) if source != self._rank]
            for piece in pieces:
                part, key = _part(total, piece), self._key(sent.number, self._rank, piece, self._sender)
                own = self.memories[piece.codec].keep(part, piece.segments, key, codecs[piece.codec])
                part.copy_(self._decoded(others, piece, scale, bucket.device).add_(own, alpha=scale))
        return total

    def _decoded(self, payloads: Sequence[Tensor], piece: Piece, scale: float, device: torch.device) -> Tensor:
        """`scale` times the sum of one piece over messages: flat fp32 [piece.numel]."""
        codec = self.codecs_at(self.clock.step)[piece.codec]
        out = torch.zeros(piece.numel, dtype=torch.float32, device=device)
        codec.decode_add([payload[piece.begin : piece.end] for payload in payloads], piece.segments, out, scale)
        return out


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
