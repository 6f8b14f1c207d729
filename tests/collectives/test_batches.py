"""Messages of all owners in one call have the bits of one message after another: payloads, residuals and sums."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_compress.collectives.buckets import Partition, even_partition, partition_by_sizes
from deepspeed_compress.collectives.messages import Channel, MessageLayout, Messages, make_layouts
from deepspeed_compress.collectives.packing import Packer
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.compression.codec import Batch, Codec, NoSend, Part
from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor, Sign, TopK, message_key
from deepspeed_compress.compression.feedback import ErrorFeedback, Feedback, MomentumCorrection, NoFeedback, SpreadSum
from deepspeed_compress.compression.residuals import ELEMENTS, Residuals
from deepspeed_compress.compression.segments import elements, gather, scatter
from deepspeed_compress.compression.transforms import DCT, Hadamard, Identity, Transform
from deepspeed_compress.monitor import Meter
from tests.support.codecs import CODECS
from tests.support.reducers import interleaved, normal

SEED, SENDER, SCALE = 11, 7, 1 / 3
SIZES = (("weight", 3000), ("bias", 37), ("other", 1011))


def few_owners(ranks: int) -> Partition:
    """Return a bucket of ZeRO 2: most ranks own none of it, and one owns a part of an odd length."""
    return partition_by_sizes([("weight", [(ranks - 1, 1023), (0, 2)]), ("other", [(0, 1025), (ranks - 1, 1)])], ranks)


PARTITIONS = {
    "even": lambda ranks: even_partition(SIZES, ranks),
    "interleaved": interleaved,
    "few owners": few_owners,
}


@dataclass
class OneByOne:
    """The same as `Packer`, one message after another."""

    messages: Messages
    run: Run
    rank: int
    sender: int

    def channel(self, piece: Any) -> Channel:
        return self.messages.channels[piece.channel]

    def key(self, number: int, owner: int, piece: Any, sender: int) -> int:
        parts = (self.run.seed, self.run.clock.step, self.messages.level, number, owner, piece.channel)
        return message_key(parts, sender)

    def pack(self, bucket: Tensor, layout: MessageLayout, number: int) -> Tensor:
        packed = [torch.empty(0, dtype=torch.uint8)]
        for owner, pieces in enumerate(layout.owners):
            for piece in pieces if owner != self.rank else ():
                channel, out = self.channel(piece), torch.empty(piece.end - piece.begin, dtype=torch.uint8)
                x = channel.codec.coefficients(elements(bucket, piece.segments), piece.segments)
                key = self.key(number, owner, piece, self.sender)
                channel.feedback.encode(x, piece.segments, out, key, channel.codec)
                packed.append(out)
        return torch.cat(packed)

    def pack_owned(self, total: Tensor, layout: MessageLayout, number: int, in_basis: bool, out: Tensor) -> None:
        for piece in layout.pieces:
            channel, x = self.channel(piece), total[piece.first : piece.first + piece.numel]
            x = x if in_basis else channel.codec.coefficients(x, piece.segments)
            key = self.key(number, self.rank, piece, self.rank)
            channel.mean_feedback.encode(x, piece.segments, out[piece.begin : piece.end], key, channel.codec)

    def unpack(self, payload: Tensor, layout: MessageLayout, bucket: Tensor) -> None:
        begin = 0
        for pieces, size in zip(layout.owners, layout.sizes, strict=True):
            for piece in pieces:
                channel, codec = self.channel(piece), self.channel(piece).codec
                sums = self.decoded([payload[begin + piece.begin : begin + piece.end]], piece, codec, 1.0)
                total = codec.transform.inverse(sums, piece.segments)
                if channel.spread is not None:
                    total = channel.spread.deliver(total, piece.segments, self.run.clock.step)
                scatter(total, piece.segments, bucket)
            begin += size

    def sum(
        self, local: Tensor, payloads: Tensor, layout: MessageLayout, number: int, scale: float, deliver: bool
    ) -> None:
        for piece in layout.pieces:
            channel, codec = self.channel(piece), self.channel(piece).codec
            own = local[piece.first : piece.first + piece.numel]
            parts = [payload[piece.begin : piece.end] for payload in payloads]
            exact = channel.feedback.keep(own, piece.segments, codec)
            if exact is None:
                mine, x = (
                    torch.empty(piece.end - piece.begin, dtype=torch.uint8),
                    codec.coefficients(own, piece.segments),
                )
                key = self.key(number, self.rank, piece, self.sender)
                channel.feedback.encode(x, piece.segments, mine, key, codec)
                sums = self.decoded([mine, *parts], piece, codec, scale)
                total = codec.transform.inverse(sums, piece.segments) if deliver else sums
            elif deliver and isinstance(codec.transform, Identity):
                total = self.decoded(parts, piece, codec, scale, exact.mul_(scale).clone())
            elif deliver:
                sums = codec.transform.inverse(self.decoded(parts, piece, codec, scale), piece.segments)
                total = exact.mul_(scale) + sums
            else:
                total = self.decoded(
                    parts, piece, codec, scale, codec.coefficients(exact * scale, piece.segments).clone()
                )
            if deliver and channel.spread is not None:
                total = channel.spread.deliver(total, piece.segments, self.run.clock.step)
            own.copy_(total)

    def decoded(
        self, parts: Sequence[Tensor], piece: Any, codec: Codec, scale: float, total: Tensor | None = None
    ) -> Tensor:
        total = torch.zeros(piece.numel) if total is None else total
        for part in parts:
            codec.compressor.decompress_add(part, total, scale)
        return total


Stores = list[Residuals]


def with_feedback(dtype: str, stores: Stores, **options: Any) -> Feedback:
    stores.append(Residuals(dtype, transactional=True))
    return ErrorFeedback(stores[-1], **options)


def with_momentum(stores: Stores) -> Feedback:
    stores += [Residuals("fp32", transactional=True) for _ in range(2)]
    return MomentumCorrection(*stores[-2:], 0.9)


FEEDBACKS = {
    "none": lambda stores: NoFeedback(),
    "fp32": lambda stores: with_feedback("fp32", stores),
    "bf16": lambda stores: with_feedback("bf16", stores, decay=0.9),
    "int8": lambda stores: with_feedback("int8", stores),
    "own encoded": lambda stores: with_feedback("bf16", stores, own_exact=False),
    "momentum": with_momentum,
}
WIDTHS = {"weight": 50, "other": 3}
TRANSFORMS: dict[str, Transform] = {"identity": Identity(), "hadamard": Hadamard(64, 3), "dct": DCT(WIDTHS, 8)}


def make_messages(codec: Codec, feedback: str, override: Codec | None, spread: bool) -> tuple[Messages, Stores]:
    """Return messages of three channels, and their stores: uncompressed, of the method, and of an override."""
    stores: Stores = []
    made = [FEEDBACKS[feedback](stores) for _ in range(2)]
    if spread:
        stores.append(Residuals("fp32", transactional=True))
    channels = [
        Channel(Codec(Cast(torch.bfloat16)), uncompressed=True),
        Channel(codec, *made, spread=SpreadSum(stores[-1], 3) if spread else None),
    ]
    channels += [] if override is None else [Channel(override, made[0])]
    names = {"weight": 1, "other": 1, "norm": len(channels) - 1}
    return Messages(tuple(channels), names, 2), stores


def trace(kind: Any, codec: Codec, feedback: str, options: dict[str, Any], ranks: int) -> Iterator[tuple[str, Any]]:
    """Yield what one rank sends, keeps and computes in some steps, of which one is skipped and layouts change."""
    messages, stores = make_messages(codec, feedback, options.get("override"), options.get("spread", False))
    run, rank, dtype = Run(StepClock(), Meter(timed=False), SEED), ranks // 2, options.get("dtype", torch.float32)
    packer, names = kind(messages, run, rank, SENDER), list(PARTITIONS)[:: options.get("order", 1)]
    for step, name in enumerate([*names[:2], names[1], names[0], names[2]]):
        run.clock.begin(step)
        partition = PARTITIONS[name](ranks)
        parts = [partition.owned_by(owner) for owner in range(ranks)]
        for number, mine in enumerate(make_layouts(messages, parts, rank, options.get("rounds", 1))):
            bucket = normal(rank, partition.numel, step).to(dtype)
            bucket[5:60] *= -0.0
            yield "sent", packer.pack(bucket, mine, number)
            local = gather(bucket, mine.own)
            others = [torch.empty(mine.size, dtype=torch.uint8) for _ in range(ranks - 1)]
            for source, message in enumerate(others):
                encoder = OneByOne(make_messages(codec, "none", options.get("override"), False)[0], run, rank, source)
                encoder.pack_owned(normal(source, mine.numel, step), mine, number, False, message)
            payloads = torch.stack(others) if others else torch.empty(0, mine.size, dtype=torch.uint8)
            for deliver in (False, True):
                packer.sum(local, payloads, mine, number, SCALE, deliver)
                yield f"sum {deliver}", local.clone()
            whole, begin = torch.zeros(sum(mine.sizes), dtype=torch.uint8), mine.place.start
            packer.pack_owned(local, mine, number, bool(step % 2), whole[mine.place])
            yield "owned", whole[begin : begin + mine.size].clone()
            for owner in set(range(ranks)) - {rank}:
                other = replace(mine, rank=owner)
                encoder = OneByOne(make_messages(codec, "none", options.get("override"), False)[0], run, owner, owner)
                encoder.pack_owned(normal(owner, other.numel, step), other, number, False, whole[other.place])
            if kind is Packer:
                packer.unpack(whole, mine.gathered, bucket)
                packer.unpack(whole, mine.gathered_own, bucket)
            else:
                packer.unpack(whole, mine, bucket)
            yield "bucket", bucket
        for store in stores:
            store.rollback() if step == 2 else store.commit()
            yield "values", dict(store.payloads()), store.bases()


def check(codec: Codec, feedback: str, ranks: int, **options: Any) -> None:
    """Compare both implementations, bit for bit."""
    traces = (trace(kind, codec, feedback, options, ranks) for kind in (Packer, OneByOne))
    for number, (actual, expected) in enumerate(zip(*traces, strict=True)):
        context = f"item {number}: {actual[0]}"
        if actual[0] == "values":
            assert actual[2] == expected[2], context
            assert actual[1].keys() == expected[1].keys(), context
            pairs = [(actual[1][layout], expected[1][layout]) for layout in actual[1]]
        else:
            pairs = [(actual[1], expected[1])]
        for one, other in pairs:
            assert one.contiguous().view(torch.uint8).equal(other.contiguous().view(torch.uint8)), context


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_bits_are_those_of_one_message_after_another(feedback: str, transform: str, ranks: int) -> None:
    check(Codec(Blockwise(4, 32), TRANSFORMS[transform]), feedback, ranks)


@pytest.mark.parametrize("compressor", CODECS, ids=repr)
def test_bits_of_every_method(compressor: Compressor) -> None:
    for feedback, ranks in (("none", 3), ("bf16", 3), ("own encoded", 2)):
        check(Codec(compressor), feedback, ranks)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "order": -1},
        {"rounds": 3},
        {"override": Codec(Sign(32, levels=3))},
        {"override": Codec(NoSend()), "rounds": 2},
        {"override": Codec(TopK(0.1, 64)), "dtype": torch.bfloat16},
        {"spread": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_bits_in_every_setting(bits: int, options: dict[str, Any]) -> None:
    for stochastic in (False, True):
        check(Codec(Blockwise(bits, 64, stochastic)), "bf16", 3, **options)


def test_equal_channels_share_a_batch() -> None:
    """So the number of calls does not depend on the number of parameters that have a channel of their own."""
    codec = Codec(Blockwise(8, 64))
    messages = Messages(
        (Channel(Codec(Cast(torch.float32)), uncompressed=True), Channel(codec), Channel(codec)),
        {"weight": 1, "other": 2},
    )
    partition = even_partition(SIZES, 8)
    [layout] = make_layouts(messages, [partition.owned_by(owner) for owner in range(8)], 0)
    assert [(index, {part.channel for part in batch.parts}) for index, batch in layout.gathered] == [
        (0, {0}),
        (1, {1, 2}),
    ]


@pytest.mark.parametrize("alignment", [1, 32])
def test_the_residuals_of_a_batch_of_one_message_are_those_of_the_message(alignment: int) -> None:
    cpu, store, values = torch.device("cpu"), Residuals("bf16", transactional=True), torch.arange(100.0)
    [segment] = even_partition([("weight", 100)], 1).segments
    batch = Batch([Part((segment,), 100, 0, 100, 0, 0, 0)], alignment)
    store.write([segment], values)
    store.commit()
    for factor in (2.0, 4.0):
        buffers = store.joint_buffers(batch, cpu, ELEMENTS)
        assert buffers is not None
        before, after = buffers
        assert before.numel() == after.numel() == batch.numel
        torch.testing.assert_close(before[:100].float() * 2, values * factor)
        after.copy_(before * 2)
        store.commit()
        torch.testing.assert_close(store.read([segment], cpu), values * factor)
        # The elements move to another layout, and back.
        store.read(even_partition([("weight", 100)], 2).segments[:1], cpu)
