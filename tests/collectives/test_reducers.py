"""Payload reducers with ranks as threads, compared with explicit sums."""

import gc
import itertools
import math
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup

from deepspeed_compress.collectives.buckets import Partition, even_partition
from deepspeed_compress.collectives.exchange import Link, exchange
from deepspeed_compress.collectives.messages import Channel, Messages
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.probes import cosine_with_truth, true_sum
from deepspeed_compress.collectives.reducer import ClippingReducer, MessageCounter, Run, StepClock
from deepspeed_compress.compression.codec import Codec, NoSend
from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor, Sign, TopK
from deepspeed_compress.compression.feedback import ErrorFeedback, Feedback, NoFeedback, SpreadSum
from deepspeed_compress.compression.kernels.arguments import CHANNEL, OWNER, Keys, MessageTable, ResidualBuffers
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import gather
from deepspeed_compress.compression.transforms import DCT, Hadamard, Transform
from deepspeed_compress.monitor import Meter
from tests.support.codecs import CODECS, is_random, transmit
from tests.support.reducers import integers, interleaved, normal, raw_bytes
from tests.support.threads import connect, run_threads

SAMPLED = pytest.mark.sampled(8)

FP32 = Cast(torch.float32)
INT4 = Blockwise(4, 32)
TOPK = TopK(0.1, 64)
STOCHASTIC = Blockwise(8, 32, stochastic=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANKS = (1, 2, 3, 4)
NUMELS = (0, 2, 13, 211)
"""Bucket sizes: empty, fewer elements than ranks, and two that are not divisible by 2, 3 or 4."""

every_ranks = pytest.mark.parametrize("ranks", RANKS)
every_numel = pytest.mark.parametrize("numel", NUMELS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_codec = pytest.mark.parametrize("codec", [*CODECS], ids=repr)


def layout(numel: int, ranks: int) -> Partition:
    """Return a bucket of "weight" and the shorter "bias", cut into near-equal runs."""
    bias = numel // 3
    return even_partition([("weight", numel - bias), ("bias", bias)], ranks)


def make_reducer(
    group: ProcessGroup,
    codecs: Sequence[Compressor | Codec],
    channel_of: Mapping[str, int] = MappingProxyType({}),
    residuals: Sequence[Residuals] = (),
    seed: int = 0,
    chunk_numel: int | None = None,
    clock: StepClock | None = None,
    own_exact: bool = True,
) -> PayloadReducer:
    """Return a reducer without error feedback, or with `residuals` for gradients and means."""
    table = [codec if isinstance(codec, Codec) else Codec(codec) for codec in codecs]
    feedback: tuple[Feedback, ...] = (NoFeedback(), NoFeedback())
    if residuals:
        feedback = ErrorFeedback(residuals[0], own_exact=own_exact), ErrorFeedback(residuals[1])
    messages = Messages(tuple(Channel(codec, *feedback) for codec in table), channel_of)
    return PayloadReducer(Link(group), messages, Run(clock or StepClock(), Meter(), seed), chunk_numel)


def reduced(
    operation: str,
    buckets: Sequence[Tensor],
    partition: Partition,
    codecs: Sequence[Compressor],
    scale: float = 1.0,
    channel_of: Mapping[str, int] = MappingProxyType({}),
) -> list[Tensor]:
    """Return the bucket of every rank after `operation`."""

    def work(group: ProcessGroup, rank: int) -> Tensor:
        bucket = buckets[rank].clone()
        getattr(make_reducer(group, codecs, channel_of), operation)(bucket, partition, scale)
        return bucket

    return run_threads(len(buckets), work)


@SAMPLED
@every_dtype
@every_numel
@every_ranks
def test_all_reduce_with_an_exact_codec_gives_the_sum(ranks: int, numel: int, dtype: torch.dtype) -> None:
    buckets = [integers(rank, numel, dtype) for rank in range(ranks)]
    for found in reduced("all_reduce", buckets, layout(numel, ranks), [Cast(dtype)]):
        assert found.dtype == dtype
        assert torch.equal(found, sum(buckets))


@SAMPLED
@every_dtype
@every_numel
@every_ranks
def test_reduce_scatter_sums_own_segments_and_keeps_the_others(ranks: int, numel: int, dtype: torch.dtype) -> None:
    buckets = [integers(rank, numel, dtype) for rank in range(ranks)]
    partition = layout(numel, ranks)
    for rank, found in enumerate(reduced("reduce_scatter", buckets, partition, [Cast(dtype)])):
        expected = buckets[rank].clone()
        for segment in partition.owned_by(rank):
            part = slice(segment.offset, segment.offset + segment.numel)
            expected[part] = sum(bucket[part] for bucket in buckets)
        assert torch.equal(found, expected)


@SAMPLED
@pytest.mark.parametrize("codec", [codec for codec in CODECS if not is_random(codec)], ids=repr)
def test_reduce_scatter_adds_decoded_messages_to_exact_own_elements(codec: Compressor) -> None:
    ranks, partition = 3, interleaved(3)
    buckets = [normal(rank, partition.numel) for rank in range(ranks)]
    for rank, found in enumerate(reduced("reduce_scatter", buckets, partition, [codec], 0.5)):
        own = [gather(bucket, partition.owned_by(rank)) for bucket in buckets]
        parts = [own[peer] if peer == rank else transmit(codec, own[peer]) for peer in range(ranks)]
        torch.testing.assert_close(gather(found, partition.owned_by(rank)), 0.5 * sum(parts), rtol=1e-6, atol=1e-6)


@SAMPLED
@every_dtype
@every_codec
def test_all_ranks_get_the_same_bits(codec: Compressor, dtype: torch.dtype) -> None:
    partition = interleaved(4)
    buckets = [normal(rank, partition.numel).to(dtype) for rank in range(4)]
    found = reduced("all_reduce", buckets, partition, [codec], 0.25)
    assert len({raw_bytes(bucket) for bucket in found}) == 1
    assert not torch.equal(found[0], buckets[0])


def test_a_bucket_may_use_several_codecs() -> None:
    """Parameters of the exact codec get the exact sum; the error of the others is bounded."""
    partition = interleaved(3)
    buckets = [integers(rank, partition.numel) for rank in range(3)]
    found = reduced("all_reduce", buckets, partition, [FP32, INT4], channel_of={"weight": 1})[0]
    exact = [segment for segment in partition.segments if segment.parameter != "weight"]
    lossy = [segment for segment in partition.segments if segment.parameter == "weight"]
    total = sum(buckets)
    assert torch.equal(gather(found, exact), gather(total, exact))
    assert not torch.equal(gather(found, lossy), gather(total, lossy))
    # Two senders and the mean each have an error of half a level, for magnitudes up to 20, 20 and 60 + 2 * 20 / 14.
    assert (gather(found, lossy) - gather(total, lossy)).abs().max() <= (20 + 20 + 63) / 14


class Counting:
    """A process group that counts the bytes passed to `send`."""

    def __init__(self, group: ProcessGroup) -> None:
        self.size, self.rank, self.recv, self.name = group.size, group.rank, group.recv, group.name
        self._send = group.send
        self.sent = 0
        self.targets: list[int] = []

    def send(self, tensors: list[Tensor], target: int, tag: int) -> object:
        self.sent += sum(tensor.nbytes for tensor in tensors)
        self.targets.append(target)
        return self._send(tensors, target, tag)


def message_bytes(partition: Partition, owner: int, codecs: Sequence[Compressor], biased: bool) -> int:
    """Return the size of a message: one payload for the elements of each codec."""
    names = [(segment.numel, int(biased and segment.parameter == "bias")) for segment in partition.owned_by(owner)]
    numels = [sum(numel for numel, codec in names if codec == index) for index in range(len(codecs))]
    return sum(codec.payload_bytes(numel) for codec, numel in zip(codecs, numels, strict=True))


@SAMPLED
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@every_numel
@every_ranks
def test_the_meter_counts_the_sent_bytes(ranks: int, numel: int, operation: str) -> None:
    codecs, partition = [INT4, FP32], layout(numel, ranks)

    def work(group: ProcessGroup, rank: int) -> tuple[int, int]:
        counting = Counting(group)
        reducer = make_reducer(counting, codecs, {"bias": 1})  # type: ignore[arg-type]
        getattr(reducer, operation)(normal(rank, numel), partition, 1.0)
        return reducer.run.meter.bytes_sent, counting.sent

    sizes = [message_bytes(partition, owner, codecs, biased=True) for owner in range(ranks)]
    for rank, (metered, sent) in enumerate(run_threads(ranks, work)):
        back = (ranks - 1) * sizes[rank] if operation == "all_reduce" else 0
        assert metered == sent == sum(sizes) - sizes[rank] + back


@pytest.mark.parametrize("ranks", [2, 5])
def test_each_direction_has_its_own_group(ranks: int) -> None:
    """Otherwise, gloo would announce messages of one direction behind those of the other."""
    store = HashStore()

    def work(group: ProcessGroup, rank: int) -> tuple[list[int], list[int], Tensor]:
        up, down = Counting(group), Counting(connect(store, rank, ranks))
        outgoing = [torch.tensor([rank, target], dtype=torch.uint8) for target in range(ranks)]
        incoming = [torch.zeros(2, dtype=torch.uint8) for _ in range(ranks)]
        Link(up, down).start(outgoing, incoming, 3).finish()  # type: ignore[arg-type]
        return sorted(up.targets), sorted(down.targets), torch.stack(incoming)

    for rank, (up, down, received) in enumerate(run_threads(ranks, work)):
        assert (up, down) == (list(range(rank + 1, ranks)), list(range(rank)))
        assert received.tolist() == [[source, rank] if source != rank else [0, 0] for source in range(ranks)]


STEPS = 30


def exact_sum(ranks: int, numel: int) -> Tensor:
    """Return the sum of the exact means of all steps, in float64."""
    inputs = [normal(rank, numel, step).double() for step in range(STEPS) for rank in range(ranks)]
    return torch.stack(inputs).sum(dim=0) / ranks


def flat_residual(residuals: Residuals, partition: Partition) -> Tensor:
    """Return residuals at their places in the bucket, and zeros where a rank sends nothing."""
    flat = torch.zeros(partition.numel, dtype=torch.float64)
    offsets = {(s.parameter, s.begin, s.numel): s.offset for s in partition.segments}
    for piece, values in residuals.items():
        flat.narrow(0, offsets[piece], piece[2]).copy_(values)
    return flat


def long_run(
    operation: str, codec: Compressor | Codec, partition: Partition, own_exact: bool
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return for each rank the sum of STEPS results, and the final residuals of gradients and means."""

    def work(group: ProcessGroup, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        stores = [Residuals("fp32", transactional=False) for _ in range(2)]
        reducer = make_reducer(group, [codec], residuals=stores, own_exact=own_exact)
        total = torch.zeros(partition.numel, dtype=torch.float64)
        for step in range(STEPS):
            reducer.run.clock.begin(step)
            bucket = normal(rank, partition.numel, step)
            getattr(reducer, operation)(bucket, partition, 1 / group.size())
            total += bucket
        return total, flat_residual(stores[0], partition), flat_residual(stores[1], partition)

    return run_threads(partition.world_size, work)


ROTATED = Codec(TOPK, DCT({"weight": 10}, 4))


@SAMPLED
@pytest.mark.parametrize(
    ("codec", "own_exact", "bound"),
    [*((codec, True, 6e-5) for codec in (INT4, TOPK, STOCHASTIC, Cast(torch.bfloat16))), (ROTATED, False, 3e-4)],
    ids=repr,
)
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_results_and_residuals_add_up_to_the_exact_sum(
    ranks: int, operation: str, codec: Compressor | Codec, own_exact: bool, bound: float
) -> None:
    """Sum of results + residual of the mean + mean of the residuals = sum of exact means, for what a rank gets.

    The bound allows for fp32 rounding of STEPS sums of a few terms below 8: STEPS * 8 * 4 * 2**-24 = 6e-5. For the
    coefficients of a transform, it also allows for a few units in the last place of numbers below 32 in each step.
    """
    partition = layout(211, ranks)
    results = long_run(operation, codec, partition, own_exact)
    left = sum(gradients / ranks + means for _, gradients, means in results)
    for rank, (total, _, _) in enumerate(results):
        error = (total + left - exact_sum(ranks, 211)).abs()
        for segment in partition.segments if operation == "all_reduce" else partition.owned_by(rank):
            assert error.narrow(0, segment.offset, segment.numel).max() <= bound
    assert left.abs().max() > 1e-3


@SAMPLED
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_codec
def test_a_non_finite_element_of_one_rank_reaches_all_ranks(codec: Compressor, bad: float) -> None:
    ranks, partition = 3, interleaved(3)
    buckets = [normal(rank, partition.numel) for rank in range(ranks)]
    buckets[1][partition.owned_by(2)[0].offset] = bad
    for found in reduced("all_reduce", buckets, partition, [codec], 1 / ranks):
        assert not found.isfinite().all()


@SAMPLED
@pytest.mark.parametrize(("source", "owner"), [(0, 1), (1, 0), (1, 1)])
@every_codec
def test_a_non_finite_element_reaches_only_its_owner(codec: Compressor, source: int, owner: int) -> None:
    partition = interleaved(2)
    buckets = [normal(rank, partition.numel) for rank in range(2)]
    buckets[source][partition.owned_by(owner)[0].offset] = math.nan
    for rank, found in enumerate(reduced("reduce_scatter", buckets, partition, [codec])):
        assert bool(gather(found, partition.owned_by(rank)).isfinite().all()) == (rank != owner)


def test_a_subgroup_reduces_only_over_its_ranks() -> None:
    """World ranks 1 and 3 are ranks 0 and 1 of the group; the others do not take part."""
    store, members, partition = HashStore(), [1, 3], layout(13, 2)

    def work(_: ProcessGroup, rank: int) -> Tensor:
        bucket = integers(rank, 13)
        if rank in members:
            group = connect(store, members.index(rank), len(members))
            make_reducer(group, [FP32]).all_reduce(bucket, partition, 1.0)
        return bucket

    found = run_threads(4, work)
    total = integers(1, 13) + integers(3, 13)
    for rank, bucket in enumerate(found):
        assert torch.equal(bucket, total if rank in members else integers(rank, 13))


def training_bits(seed: int, first_step: int = 0) -> list[bytes]:
    """Return the bits of two steps of both operations with stochastic rounding and error feedback, by rank."""
    partition = layout(211, 3)

    def work(group: ProcessGroup, rank: int) -> bytes:
        stores = [Residuals("bf16", transactional=False) for _ in range(2)]
        reducer = make_reducer(group, [STOCHASTIC], residuals=stores, seed=seed)
        results = []
        for step, operation in itertools.product(range(2), ["all_reduce", "reduce_scatter", "all_reduce"]):
            reducer.run.clock.begin(first_step + step)
            bucket = normal(rank, 211, step)
            getattr(reducer, operation)(bucket, partition, 1 / 3)
            results.append(raw_bytes(bucket))
        return b"".join(results)

    return run_threads(3, work)


def test_runs_depend_on_nothing_but_seed_and_step() -> None:
    found = training_bits(seed=1)
    assert training_bits(seed=1) == found
    for seed, first_step in ((2, 0), (1, 5)):
        assert training_bits(seed, first_step)[0] != found[0]


def test_no_two_messages_share_random_numbers() -> None:
    """Keys differ between messages, owners, senders and codecs."""
    keys: list[int] = []
    partition = interleaved(3)

    class Recording(Blockwise):
        def compress_all(
            self, x: Tensor, at: int, out: Tensor, table: MessageTable, drawn: Keys, residual: ResidualBuffers | None
        ) -> None:
            keys.extend(drawn.of(row[OWNER], row[CHANNEL]) for row in table.values)
            super().compress_all(x, at, out, table, drawn, residual)

    def work(group: ProcessGroup, rank: int) -> None:
        reducer = make_reducer(group, [Recording(), Recording(4)], {"bias": 1})
        for step in range(2):
            reducer.run.clock.begin(step)
            for _ in range(2):
                reducer.all_reduce(normal(rank, partition.numel), partition, 1.0)

    run_threads(3, work)
    assert len(set(keys)) == len(keys) > 2 * 2 * 3 * 3


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 1.0), (-3.0, -1.0), (0.0, math.nan), (math.inf, math.nan)])
def test_the_cosine_covers_the_own_segments_of_all_ranks(factor: float, expected: float) -> None:
    partition = interleaved(3)

    def work(group: ProcessGroup, rank: int) -> float:
        true = true_sum(group, normal(rank, partition.numel))
        return cosine_with_truth(group, true * factor, true, partition.owned_by(rank))()

    assert run_threads(3, work) == pytest.approx([expected] * 3, nan_ok=True)


@every_dtype
def test_the_true_sum_is_fp32_and_does_not_change_the_bucket(dtype: torch.dtype) -> None:
    def work(group: ProcessGroup, rank: int) -> tuple[Tensor, Tensor]:
        bucket = integers(rank, 13, dtype)
        return true_sum(group, bucket), bucket

    for rank, (total, bucket) in enumerate(run_threads(3, work)):
        assert total.dtype == torch.float32
        assert torch.equal(total, sum(integers(peer, 13) for peer in range(3)))
        assert torch.equal(bucket, integers(rank, 13, dtype))


def test_a_bucket_must_match_its_partition() -> None:
    def work(group: ProcessGroup, rank: int) -> None:
        make_reducer(group, [FP32]).all_reduce(torch.zeros(5), layout(4, 2), 1.0)

    with pytest.raises(AssertionError, match="bucket of 5 for a partition of 4"):
        run_threads(2, work)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("chunk_numel", [1, 50, 10**6])
def test_a_bucket_in_chunks_gives_the_same_sums_and_bytes(operation: str, chunk_numel: int) -> None:
    ranks, partition = 3, interleaved(3)

    def work(group: ProcessGroup, rank: int) -> tuple[Tensor, int, int]:
        reducer = make_reducer(group, [FP32], chunk_numel=chunk_numel)
        bucket = normal(rank, partition.numel)
        getattr(reducer, operation)(bucket, partition, 1.0)
        return bucket, reducer.run.meter.bytes_sent, len(reducer.layouts(partition))

    whole = reduced(operation, [normal(rank, partition.numel) for rank in range(ranks)], partition, [FP32])
    for expected, (found, sent, rounds) in zip(whole, run_threads(ranks, work), strict=True):
        assert torch.equal(found, expected)
        assert rounds == max(1, -(-partition.numel // chunk_numel))
        assert sent >= 4 * partition.numel // ranks


def test_delayed_parameters_arrive_as_the_sum_of_their_steps() -> None:
    """Every third step delivers the mean of three steps; the steps between deliver zeros, even for own elements."""
    partition, every = interleaved(2), 3

    def work(group: ProcessGroup, rank: int) -> list[Tensor]:
        stores, clock = [Residuals("fp32", transactional=True) for _ in range(2)], StepClock()
        silent, sending = (make_reducer(group, [codec], residuals=stores, clock=clock) for codec in (NoSend(), FP32))
        results = []
        for step in range(2 * every):
            clock.begin(step)
            bucket = integers(10 * step + rank, partition.numel)
            (silent if (step + 1) % every else sending).reduce_scatter(bucket, partition, 0.5)
            stores[0].commit()
            results.append(gather(bucket, partition.owned_by(rank)))
        return results

    for rank, results in enumerate(run_threads(2, work)):
        for step, result in enumerate(results):
            steps = range(step + 1 - every, step + 1) if (step + 1) % every == 0 else ()
            parts = [integers(10 * past + peer, partition.numel) for past in steps for peer in range(2)]
            expected = 0.5 * sum(parts, torch.zeros(partition.numel))
            assert torch.equal(result, gather(expected, partition.owned_by(rank)))


@SAMPLED
@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("skipped", [(), (4,), (5,), (2, 7)])
def test_a_spread_sum_is_delivered_in_equal_parts(operation: str, micro_steps: int, skipped: tuple[int, ...]) -> None:
    """A sum is delivered in thirds, starting with the step in which it arrives.

    If a step is skipped, the remaining ones deliver its part. If a sending step is skipped, the gradients are sent in
    the next sending step.
    """
    partition, every, steps = interleaved(2), 3, 12

    def work(group: ProcessGroup, rank: int) -> list[Tensor]:
        stores, run = [Residuals("fp32", transactional=True) for _ in range(3)], Run(StepClock(), Meter())
        kept = (ErrorFeedback(stores[0]), ErrorFeedback(stores[1]), SpreadSum(stores[2], every))
        silent, sending = (
            PayloadReducer(Link(group), Messages((Channel(Codec(codec), *kept),)), run) for codec in (NoSend(), FP32)
        )
        results = []
        for step in range(steps):
            run.clock.begin(step)
            reducer = silent if (step + 1) % every else sending
            total = torch.zeros(partition.numel)
            for micro in range(micro_steps):
                bucket = gradient(step, micro, rank)
                getattr(reducer, operation)(bucket, partition, 0.5)
                total += bucket
            for store in stores:
                (store.rollback if step in skipped else store.commit)()
            results.append(gather(total, partition.owned_by(rank)))
        return results

    def gradient(step: int, micro: int, rank: int) -> Tensor:
        return 6 * integers(100 * step + 10 * micro + rank, partition.numel)

    for rank, results in enumerate(run_threads(2, work)):
        waiting = left = torch.zeros(partition.numel)
        for step, result in enumerate(results):
            parts = [gradient(step, micro, peer) for micro in range(micro_steps) for peer in range(2)]
            collected = waiting + 0.5 * sum(parts)
            sends = (step + 1) % every == 0
            total = left + collected if sends else left
            part = total / (every - (step + 1) % every)
            torch.testing.assert_close(result, gather(part, partition.owned_by(rank)), rtol=1e-5, atol=1e-4)
            if step not in skipped:
                waiting, left = torch.zeros(partition.numel) if sends else collected, total - part


@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
def test_clipping_limits_each_parameter_on_each_rank(loss_scale: float) -> None:
    partition, limit = layout(211, 2), 0.5

    def clipped(rank: int) -> Tensor:
        bucket = normal(rank, 211) * loss_scale
        for part in (bucket[:141], bucket[141:]):
            part.mul_(min(1.0, limit * loss_scale / float(part.norm())))
        return bucket

    def work(group: ProcessGroup, rank: int) -> Tensor:
        inner = make_reducer(group, [FP32])
        inner.run.clock.begin(0, loss_scale)
        bucket = normal(rank, 211) * loss_scale
        ClippingReducer(inner, limit, inner.run.clock).all_reduce(bucket, partition, 1.0)
        return bucket

    for found in run_threads(2, work):
        torch.testing.assert_close(found, clipped(0) + clipped(1), rtol=1e-5, atol=1e-6)


def test_clipping_does_not_change_small_and_non_finite_gradients() -> None:
    partition = layout(211, 1)

    def work(group: ProcessGroup, rank: int) -> list[Tensor]:
        inner = make_reducer(group, [FP32])
        found = []
        for bucket in (normal(0, 211) * 1e-3, torch.zeros(211), torch.full((211,), math.nan)):
            ClippingReducer(inner, 1.0, inner.run.clock).all_reduce(bucket, partition, 1.0)
            found.append(bucket)
        return found

    [(small, zeros, bad)] = run_threads(1, work)
    assert torch.equal(small, normal(0, 211) * 1e-3)
    assert not zeros.any()
    assert bad.isnan().all()


def scaled_signs(x: Tensor, block: int) -> Tensor:
    """Return mean |x| of each block times the signs, with sign(0) = 1, in float64."""
    return torch.cat([part.abs().mean() * torch.where(part < 0, -1.0, 1.0).double() for part in x.split(block)])


def test_sign_with_two_residuals_follows_one_bit_adam() -> None:
    """1-bit Adam, algorithm 1, in float64, with worker and server errors. Here, a server's own part is exact."""
    ranks, numel, block, steps = 3, 96, 32, 5
    partition = even_partition([("w", numel)], ranks)
    gradients = [[integers(10 * step + rank, numel) for rank in range(ranks)] for step in range(steps)]

    def work(group: ProcessGroup, rank: int) -> list[Tensor]:
        stores = [Residuals("fp32", transactional=False) for _ in range(2)]
        reducer = make_reducer(group, [Sign(block)], residuals=stores)
        results = []
        for step in range(steps):
            bucket = gradients[step][rank].clone()
            reducer.all_reduce(bucket, partition, 1 / ranks)
            results.append(bucket)
        return results

    worker = torch.zeros(ranks, numel, dtype=torch.float64)
    server = torch.zeros(numel, dtype=torch.float64)
    expected = []
    for step in range(steps):
        mean = torch.zeros(numel, dtype=torch.float64)
        for owner in range(ranks):
            part = slice(owner * block, (owner + 1) * block)
            for rank in range(ranks):
                sent = gradients[step][rank][part].double() + worker[rank, part]
                if rank != owner:
                    worker[rank, part] = sent - scaled_signs(sent, block)
                    sent = scaled_signs(sent, block)
                mean[part] += sent / ranks
        total = mean + server
        server = total - scaled_signs(total, block)
        expected.append(scaled_signs(total, block))
    for found in run_threads(ranks, work):
        for step in range(steps):
            torch.testing.assert_close(found[step].double(), expected[step], rtol=1e-4, atol=1e-4)


def test_a_reducer_is_freed_with_its_last_reference() -> None:
    """A process group that the garbage collector frees may be destroyed in a forked child, which crashes."""

    def work(group: ProcessGroup, rank: int) -> bool:
        reducer = make_reducer(group, [FP32])
        reducer.all_reduce(normal(rank, 13), layout(13, 2), 1.0)
        known = weakref.ref(reducer)
        del reducer
        return known() is None

    gc.disable()
    try:
        assert run_threads(2, work) == [True, True]
    finally:
        gc.enable()


def test_messages_are_numbered_within_a_step() -> None:
    clock = StepClock()
    first, second = MessageCounter(clock), MessageCounter(clock)
    clock.begin(7)
    assert [first.next(), first.next(), second.next()] == [1, 2, 1]
    clock.begin(7, 2.0)
    assert (clock.step, clock.loss_scale, first.next()) == (7, 2.0, 1)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_element_is_reported_at_once_even_if_it_is_held_back(
    operation: str, owner: int, bad: float
) -> None:
    partition = layout(40, 2)

    def work(group: ProcessGroup, rank: int) -> Tensor:
        reducer = make_reducer(group, [NoSend()], residuals=[Residuals("fp32", transactional=True) for _ in range(2)])
        bucket = normal(rank, 40)
        if rank == 0:
            bucket[partition.owned_by(owner)[0].offset] = bad
        getattr(reducer, operation)(bucket, partition, 0.5)
        return gather(bucket, partition.owned_by(rank))

    results = run_threads(2, work)
    assert not results[owner].isfinite().any()
    assert not results[1 - owner].any()


def test_a_gather_may_be_waited_for_several_times() -> None:
    """DeepSpeed before 0.19.8 waits for each of several handles once per parameter."""

    def work(group: ProcessGroup, rank: int) -> Tensor:
        reducer, bucket, cut = make_reducer(group, [FP32]), torch.zeros(211), layout(211, 2)
        for segment in cut.owned_by(rank):
            bucket[segment.offset : segment.offset + segment.numel] = rank + 1.0
        pending = reducer.start_all_gather(bucket, cut)
        pending.wait()
        pending.wait()
        return bucket

    first, second = run_threads(2, work)
    assert torch.equal(first, second)
    assert first.unique().tolist() == [1.0, 2.0]


def test_the_cosine_of_a_mean_that_is_half_correct() -> None:
    """Rank 0 has the exact segment, rank 1 has zeros, so cos = |a| / sqrt(|a|^2 + |b|^2) with |a| = |b|."""
    partition = layout(8, 2)

    def work(group: ProcessGroup, rank: int) -> float:
        return cosine_with_truth(group, torch.full((8,), 1.0 - rank), torch.ones(8), partition.owned_by(rank))()

    assert run_threads(2, work) == pytest.approx([0.5**0.5] * 2)


def test_every_pair_of_ranks_may_exchange_messages_of_another_size() -> None:
    ranks = 4

    def message(source: int, target: int) -> Tensor:
        return torch.full((source * target % 5,), 10 * source + target, dtype=torch.uint8)

    def work(group: ProcessGroup, rank: int) -> list[Tensor]:
        incoming = [torch.zeros_like(message(source, rank)) for source in range(ranks)]
        exchange(group, [message(rank, target) for target in range(ranks)], incoming)
        return incoming

    for rank, incoming in enumerate(run_threads(ranks, work)):
        for source in range(ranks):
            expected = message(source, rank) if source != rank else torch.zeros_like(message(rank, rank))
            assert torch.equal(incoming[source], expected)


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("transform", [Hadamard(32), DCT({"weight": 7}, 4)], ids=lambda one: type(one).__name__)
def test_sums_of_transformed_messages_are_correct(operation: str, transform: Transform) -> None:
    partition = interleaved(3)
    buckets = [normal(rank, partition.numel) for rank in range(3)]
    found = reduced(operation, buckets, partition, [Codec(FP32, transform)])
    for rank, bucket in enumerate(found):
        own = partition.owned_by(rank)
        torch.testing.assert_close(gather(bucket, own), gather(sum(buckets), own), rtol=1e-5, atol=1e-5)


def test_payload_sizes_do_not_depend_on_the_values() -> None:
    """One rank sends zeros, and the other one random numbers."""
    partition = layout(211, 2)

    def work(group: ProcessGroup, rank: int) -> tuple[int, ...]:
        reducer = make_reducer(group, [TOPK])
        bucket = torch.zeros(211) if rank == 0 else normal(rank, 211)
        reducer.all_reduce(bucket, partition, 1.0)
        [found] = reducer.layouts(partition)
        return found.sizes

    first, second = run_threads(2, work)
    assert first == second
