"""Compressed reduce-scatter, all-gather and all-reduce of a flat bucket: one packed message per owner, fp32 sums.

The order of the code follows a bucket to the wire: `start_reduce_scatter` -> `_send_parts` -> `Packer.pack` -> the
channel's feedback and codec -> `Link.start`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import LAYOUTS, Partition
from deepspeed_compress.collectives.exchange import Link, PendingExchange
from deepspeed_compress.collectives.messages import MessageLayout, Messages, Transfer, make_layouts
from deepspeed_compress.collectives.packing import Packer, new_message
from deepspeed_compress.collectives.reducer import INSIDE_LEVEL, LEVELS, MessageCounter, Pending, Run, reduce_at_once
from deepspeed_compress.compression.feedback import NoFeedback
from deepspeed_compress.compression.segments import Segment, elements, gather, scatter


@dataclass(frozen=True)
class Round:
    """Messages of one layout in progress, whose tensors are kept alive. `number` is the message number.

    If all ranks get the same messages, these are both `outgoing` and `incoming`, those of all owners one after another.
    """

    layout: MessageLayout
    number: int
    outgoing: Tensor
    incoming: Tensor
    exchange: PendingExchange


@dataclass(frozen=True)
class _PendingSums:
    """Handle of a reduce-scatter (see `Pending`) that yields `scale` times the sums of `rounds`."""

    reducer: "PayloadReducer"
    rounds: Sequence[Round]
    scale: float

    @property
    def own(self) -> list[Segment]:
        return [segment for sent in self.rounds for segment in sent.layout.own]

    def finish(self, local: Tensor) -> Tensor:
        parts = torch.split(local, [sent.layout.numel for sent in self.rounds])
        for part, sent in zip(parts, self.rounds, strict=True):
            self.reducer.sum(part, sent, self.scale, deliver=True)
        return local


@dataclass
class PendingGather:
    """Handle of an all-gather in progress, which `wait` writes into the bucket.

    Like a handle of torch.distributed, it may be waited for several times, which DeepSpeed before 0.19.8 does.
    """

    reducer: "PayloadReducer"
    bucket: Tensor
    rounds: Sequence[Round]

    def wait(self) -> None:
        rounds, self.rounds = self.rounds, ()
        for sent in rounds:
            self.reducer.take(self.bucket, sent)


@dataclass
class PendingMeans:
    """Handle of an all-reduce in progress.

    Its second half begins with `send_back`, which `finish` calls if needed. `bucket` must not change before
    `send_back`, which may overwrite the elements that this rank owns. `numbers` are the message numbers of the second
    half, one per round.
    """

    reducer: "PayloadReducer"
    bucket: Tensor
    scale: float
    parts: Sequence[Round]
    numbers: Sequence[int]
    means: list[Round] = field(default_factory=list)

    def send_back(self) -> None:
        """Wait for the parts of the other ranks, and send the means that this rank owns to all ranks."""
        # One at a time: the mean of a round is sent before the parts of the next round are waited for.
        for sent, number in zip(self.parts[len(self.means) :], self.numbers[len(self.means) :], strict=True):
            own = elements(self.bucket, sent.layout.own)
            mean = self.reducer.sum(own, sent, self.scale, deliver=False)
            self.means.append(self.reducer.send_owned(mean, sent.layout, number, in_basis=True))

    def finish(self, out: Tensor) -> None:
        """Write `scale` times the sum over the ranks into `out`, which may be the bucket."""
        self.send_back()
        PendingGather(self.reducer, out, self.means).wait()


class PayloadReducer:
    """Reducer (see `Reducer`) that sends packed messages, described by `messages`, over the group of `link`.

    A rank's own elements are never sent. A bucket is split into rounds of about `chunk_numel` elements; the next round
    is compressed while one is in flight. `traffic` is the meter's name for the bytes sent. A reducer is used as long as
    its `messages` are in force.
    """

    def __init__(
        self,
        link: Link,
        messages: Messages,
        run: Run,
        chunk_numel: int | None = None,
        traffic: str = "bytes_sent",
    ) -> None:
        assert 0 <= messages.level < LEVELS, f"level {messages.level}"
        self.link = link
        self.messages = messages
        self.run = run
        self.chunk_numel = chunk_numel
        self.traffic = traffic
        self._counter = MessageCounter(run.clock)
        self._is_inside = messages.level == INSIDE_LEVEL
        self._rank: int = link.group.rank()
        self._packer = Packer(messages, run, self._rank, self._rank if link.sender is None else link.sender)
        # Not a bound method: a reference cycle would keep the process group alive until garbage collection.
        self.layouts: Callable[[Partition], tuple[MessageLayout, ...]] = lru_cache(maxsize=LAYOUTS)(
            partial(_make_layouts, messages, chunk_numel, self._rank)
        )
        """Function that returns the message layouts for a partition, one per round."""

    @property
    def group(self) -> ProcessGroup:
        return self.link.group

    def without_feedback(self) -> "PayloadReducer":
        """Return a reducer with the same messages whose sender neither applies nor updates its residuals.

        It shares this reducer's message numbers. The feedback of the means that an owner sends back is unchanged.
        """
        channels = tuple(replace(channel, feedback=NoFeedback()) for channel in self.messages.channels)
        messages = replace(self.messages, channels=channels)
        other = PayloadReducer(self.link, messages, self.run, self.chunk_numel, self.traffic)
        other._counter = self._counter
        return other

    def start_reduce_scatter(
        self, bucket: Tensor, partition: Partition, scale: float, number: int | None = None
    ) -> Pending:
        """Start a reduce-scatter; see `Reducer`.

        `number` is the number of the first message, with one message per round. If None, the next numbers are used.
        Explicit numbers do not advance the counter: see `skip_messages`.
        """
        assert bucket.numel() == partition.numel, f"bucket of {bucket.numel()} for a partition of {partition.numel}"
        if self.group.size() == 1:
            return reduce_at_once(self, bucket, partition, scale)
        layouts = self.layouts(partition)
        numbers = self._numbers(len(layouts), number)
        rounds = [self._send_parts(bucket, layout, one) for layout, one in zip(layouts, numbers, strict=True)]
        return _PendingSums(self, rounds, scale)

    def _numbers(self, count: int, first: int | None) -> Sequence[int]:
        """Return `count` message numbers, from `first` on or, if that is None, the next ones."""
        return [self._counter.next() for _ in range(count)] if first is None else range(first, first + count)

    def _send_parts(self, bucket: Tensor, layout: MessageLayout, number: int) -> Round:
        """Encode this rank's contribution to every other owner's elements and start the exchange."""
        with self.run.meter.phase("compress", bucket.device):
            outgoing = self._packer.pack(bucket, layout, number)
        incoming = new_message(bucket.device, sum(layout.incoming_sizes))
        with self.run.sending(self.traffic, outgoing.numel(), bucket.device, self._is_inside):
            exchange = self.link.start_split(
                outgoing, layout.outgoing_sizes, incoming, layout.incoming_sizes, self._tag(number)
            )
        return Round(layout, number, outgoing, incoming, exchange)

    def _tag(self, number: int) -> int:
        """Return the tag of message `number`. Messages of several reducers may be in progress in one group."""
        return number * LEVELS + self.messages.level

    def skip_messages(self, count: int) -> None:
        """Advance the message counter as if this step had sent `count` more messages."""
        self._counter.skip(count)

    def reduce_scatter(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Reduce `bucket` for its owners; see `Reducer`. Segments that other ranks own stay as they are."""
        if self.group.size() == 1:
            _scale_alone(bucket, scale)
            return
        pending = self.start_reduce_scatter(bucket, partition, scale)
        scatter(pending.finish(gather(bucket, pending.own)), pending.own, bucket)

    def all_reduce(self, bucket: Tensor, partition: Partition, scale: float) -> None:
        """Reduce `bucket` for all ranks; see `Reducer`.

        Each owner encodes its mean again, with its own error feedback (the two-sided scheme of 1-bit Adam,
        arXiv:2102.02888, algorithm 1), and decodes it like the other ranks.
        """
        if self.group.size() == 1:
            _scale_alone(bucket, scale)
            return
        self.start_all_reduce(bucket, partition, scale).finish(bucket)

    def start_all_reduce(
        self, bucket: Tensor, partition: Partition, scale: float, number: int | None = None
    ) -> PendingMeans:
        """Start an `all_reduce` in a group of several ranks.

        `number` is as in `start_reduce_scatter`, but with two messages per round.
        """
        assert bucket.numel() == partition.numel, f"bucket of {bucket.numel()} for a partition of {partition.numel}"
        layouts = self.layouts(partition)
        numbers = self._numbers(2 * len(layouts), number)
        parts = [self._send_parts(bucket, layout, one) for layout, one in zip(layouts, numbers, strict=False)]
        return PendingMeans(self, bucket, scale, parts, numbers[len(layouts) :])

    def all_gather(self, bucket: Tensor, partition: Partition) -> None:
        """Replace every segment of `bucket` by its owner's values as decoded from its message.

        All ranks, including the owner, get the same bits.
        """
        self.start_all_gather(bucket, partition).wait()

    def start_all_gather(self, bucket: Tensor, partition: Partition) -> PendingGather:
        """Start an `all_gather`. `bucket` is written when the handle is waited for."""
        layouts = self.layouts(partition)
        if self.traffic == "bytes_weights":
            exact = sum(segment.numel for segment in partition.owned_by(self._rank)) * bucket.itemsize
            sent = sum(layout.size for layout in layouts)
            self.run.meter.count("bytes_weights_saved", (exact - sent) * (self.group.size() - 1))
        rounds = [
            self.send_owned(elements(bucket, layout.own), layout, self._counter.next(), in_basis=False)
            for layout in layouts
        ]
        return PendingGather(self, bucket, rounds)

    def send_owned(self, total: Tensor, layout: MessageLayout, number: int, in_basis: bool) -> Round:
        """Start to send the elements that this rank owns to all ranks. For `total`, see `Packer.pack_owned`."""
        sizes = layout.sizes
        incoming = new_message(total.device, sum(sizes))
        with self.run.meter.phase("compress", total.device):
            self._packer.pack_owned(total, layout, number, in_basis, incoming[layout.place])
        with self.run.sending(self.traffic, layout.size * (len(sizes) - 1), total.device, self._is_inside):
            exchange = self.link.all_gather_split(incoming, sizes, self._tag(number))
        return Round(layout, number, incoming, incoming, exchange)

    def take(self, bucket: Tensor, sent: Round) -> None:
        """Wait for a round of an all-gather and write it into `bucket`."""
        meter, layout = self.run.meter, sent.layout
        # This rank's own message is decoded while the others are on their way.
        with meter.phase("decompress", bucket.device):
            self._packer.unpack(sent.incoming, layout.gathered_own, bucket)
        with meter.phase("communicate", bucket.device):
            sent.exchange.receive()
        with meter.phase("decompress", bucket.device):
            self._packer.unpack(sent.incoming, layout.gathered, bucket)
        sent.exchange.finish()

    def sum(self, local: Tensor, sent: Round, scale: float, deliver: bool) -> Tensor:
        """Wait for a round, and overwrite `local` by its sum (see `Packer.sum`), which is returned.

        Messages are added in the order of ranks.
        """
        with self.run.meter.phase("communicate", local.device):
            sent.exchange.receive()
        payloads = sent.incoming.view(self.group.size() - 1, sent.layout.size)
        with self.run.meter.phase("decompress", local.device):
            self._packer.sum(local, payloads, sent.layout, sent.number, scale, deliver)
        sent.exchange.finish()
        return local

    def transfers(self, partition: Partition, everywhere: bool) -> tuple[Transfer, ...]:
        return (Transfer(self.layouts(partition), everywhere),)


def _make_layouts(
    messages: Messages, chunk_numel: int | None, rank: int, partition: Partition
) -> tuple[MessageLayout, ...]:
    rounds = -(-partition.numel // chunk_numel) if chunk_numel else 1
    parts = [partition.owned_by(owner) for owner in range(partition.world_size)]
    return make_layouts(messages, parts, rank, max(1, rounds))


def _scale_alone(bucket: Tensor, scale: float) -> None:
    """Compute the sum over one rank. Nothing is sent, so nothing is encoded and no residual changes."""
    bucket.copy_(bucket.to(torch.float32) * scale)
