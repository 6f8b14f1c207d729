"""Reduction on two levels, and to the ranks of a node, with ranks as threads: compared with explicit sums."""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.groups import split_by_node
from deepspeed_compress.collectives.buckets import Partition, even_partition, partition_by_sizes
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.collectives.two_level import HierarchicalReducer, HybridReducer
from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor
from deepspeed_compress.compression.segments import gather
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.monitor import Meter
from tests.support.codecs import noise
from tests.support.reducers import integers, interleaved, payload_reducer, reduced_both_ways
from tests.support.threads import run_nodes

SAMPLED = pytest.mark.sampled(3)

R, T = TypeVar("R"), TypeVar("T")
FP32 = Cast(torch.float32)
STOCHASTIC = Blockwise(8, 32, stochastic=True)
SHAPES = [(2, 2), (2, 3), (3, 2)]
every_shape = pytest.mark.parametrize(("nodes", "locals_"), SHAPES)
every_partition = pytest.mark.parametrize(
    "make", [interleaved, lambda ranks: even_partition([("w", 101), ("b", 3)], ranks)]
)
sums_in_both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def run_levels(
    make: Callable[..., R],
    nodes: int,
    locals_: int,
    inside: Compressor,
    between: Compressor,
    work: Callable[[R, int], T],
    feedback: bool = False,
    chunk_numel: int | None = None,
) -> list[T]:
    """Run `work(reducer, rank)` on every rank, with rank = node * locals_ + local, and the reducer that `make` returns.

    `make` gets the group of all ranks, and the reducers inside a node and between nodes.
    """

    def on_rank(whole: ProcessGroup, inner: ProcessGroup, outer: ProcessGroup, rank: int) -> T:
        clock = StepClock()
        levels = [
            payload_reducer(group, codec, Run(clock, Meter()), feedback, chunk_numel)
            for group, codec in ((inner, inside), (outer, between))
        ]
        return work(make(whole, *levels), rank)

    return run_nodes(nodes, locals_, on_rank)


def run_hierarchy(
    nodes: int, locals_: int, inside: Compressor, between: Compressor, work: Callable[..., T], **options: Any
) -> list[T]:
    return run_levels(HierarchicalReducer, nodes, locals_, inside, between, work, **options)


def run_copies(nodes: int, locals_: int, between: Compressor, work: Callable[..., T], **options: Any) -> list[T]:
    return run_levels(lambda _, *levels: HybridReducer(*levels), nodes, locals_, FP32, between, work, **options)


@SAMPLED
@every_shape
@every_partition
@sums_in_both
def test_exact_levels_sum_over_all_ranks(
    nodes: int, locals_: int, make: Callable[[int], Partition], dtype: torch.dtype
) -> None:
    ranks = nodes * locals_
    partition = make(ranks)
    buckets = [integers(rank, partition.numel, dtype) for rank in range(ranks)]
    total = sum(bucket.float() for bucket in buckets) * 0.5

    def work(reducer: HierarchicalReducer, rank: int) -> tuple[Tensor, Tensor]:
        return reduced_both_ways(reducer, buckets[rank], partition, 0.5)

    for rank, (scattered, everywhere) in enumerate(run_hierarchy(nodes, locals_, FP32, FP32, work)):
        assert torch.equal(everywhere, total.to(dtype))
        expected = buckets[rank].clone()
        for segment in partition.owned_by(rank):
            part = slice(segment.offset, segment.offset + segment.numel)
            expected[part] = total[part].to(dtype)
        assert torch.equal(scattered, expected)


@every_shape
def test_all_ranks_get_the_same_bits_from_lossy_levels(nodes: int, locals_: int) -> None:
    """Rounding is stochastic, but the same on every node for messages that come back from other nodes."""
    partition = interleaved(nodes * locals_)

    def work(reducer: HierarchicalReducer, rank: int) -> list[Tensor]:
        results = []
        for step in range(4):
            reducer.node.run.clock.begin(step)
            bucket = noise(partition.numel, 9 * step + rank)
            reducer.all_reduce(bucket, partition, 1.0)
            results.append(bucket)
        return results

    first, *others = run_hierarchy(nodes, locals_, STOCHASTIC, Blockwise(4, 32), work, feedback=True)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


@SAMPLED
@pytest.mark.parametrize("locals_", [2, 3])
def test_feedback_on_both_levels_makes_the_mean_approach_the_exact_sum(locals_: int) -> None:
    """The residuals after 30 steps with the same gradients are bounded, so the mean result approaches the exact sum."""
    partition, steps = interleaved(2 * locals_), 30
    gradients = [noise(partition.numel, rank) for rank in range(2 * locals_)]

    def work(reducer: HierarchicalReducer, rank: int) -> Tensor:
        total = torch.zeros(partition.numel)
        for step in range(steps):
            reducer.node.run.clock.begin(step)
            bucket = gradients[rank].clone()
            reducer.reduce_scatter(bucket, partition, 1.0)
            total += bucket / steps
        return gather(total, partition.owned_by(rank))

    found = run_hierarchy(2, locals_, Blockwise(8, 32), Blockwise(4, 32), work, feedback=True)
    for rank, mean in enumerate(found):
        exact = gather(sum(gradients), partition.owned_by(rank))
        # Node sums are below 12, so half of one of 7 levels is 0.9, once in 30 steps, on each of 2 nodes.
        assert (mean - exact).abs().max() <= 2 * 0.9 / steps + 0.01


def test_messages_of_an_uneven_chunked_bucket_are_not_mixed_up() -> None:
    """The ranks of a node have parts of different sizes, so they have different numbers of rounds between nodes."""
    partition = partition_by_sizes([("w", [(0, 500), (1, 1), (2, 3), (3, 10)])], 4)

    def work(reducer: HierarchicalReducer, rank: int) -> Tensor:
        bucket = torch.zeros(partition.numel)
        for _ in range(2):
            bucket = integers(rank, partition.numel)
            reducer.all_reduce(bucket, partition, 1.0)
        return bucket

    total = sum(integers(rank, partition.numel) for rank in range(4))
    assert all(torch.equal(found, total) for found in run_hierarchy(2, 2, FP32, FP32, work, chunk_numel=50))


def test_sums_of_large_fp16_gradients_inside_a_node_do_not_overflow() -> None:
    """Their mean is in the range of fp16, but the sum over a node is not."""
    partition, fp16 = even_partition([("w", 12)], 4), Cast(torch.float16)

    def work(reducer: HierarchicalReducer, rank: int) -> Tensor:
        bucket = torch.full((12,), 60000.0, dtype=torch.float16)
        reducer.all_reduce(bucket, partition, 0.25)
        return bucket

    for found in run_hierarchy(2, 2, fp16, fp16, work):
        assert torch.equal(found, torch.full((12,), 60000.0, dtype=torch.float16))


def test_the_hierarchy_reduces_the_traffic_between_nodes() -> None:
    """With 2 nodes of 3 ranks, a rank sends a sixth of the bucket; one level would send a sixth to each of 3 ranks."""
    partition = even_partition([("w", 600)], 6)

    def work(reducer: HierarchicalReducer, rank: int) -> int:
        reducer.reduce_scatter(torch.ones(600), partition, 1.0)
        return reducer.across.run.meter.bytes_sent  # type: ignore[attr-defined, no-any-return]

    assert run_hierarchy(2, 3, FP32, FP32, work) == [100 * 4] * 6


@pytest.mark.parametrize(
    ("group", "size", "world", "expected"),
    [
        (range(4), 2, 4, [(0, 1), (2, 3)]),
        (range(6), 3, 6, [(0, 1, 2), (3, 4, 5)]),
        ((0, 2, 4, 6), 4, 8, [(0, 2), (4, 6)]),
        ((1, 3, 5, 7), 4, 8, [(1, 3), (5, 7)]),
    ],
)
def test_nodes_are_runs_of_consecutive_ranks(
    group: range, size: int, world: int, expected: list[tuple[int, ...]]
) -> None:
    assert split_by_node(group, size, world) == expected


@pytest.mark.parametrize(
    ("group", "size", "world", "reason"),
    [
        (range(4), 3, 4, "does not divide the 4 ranks"),
        (range(4), 4, 4, "all 4 data-parallel ranks on one node"),
        ((0, 1, 2), 2, 4, "unequal numbers of data-parallel ranks on the nodes: 2, 1"),
        ((0, 2, 4, 6), 2, 8, "one data-parallel rank on each node"),
    ],
)
def test_groups_that_do_not_fit_nodes_are_refused(group: range, size: int, world: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"/gradients/hierarchy/ranks_per_node: {size} .*{reason}"):
        split_by_node(group, size, world)


@pytest.mark.parametrize(("nodes", "locals_"), [*SHAPES, (3, 1)])
@every_partition
@sums_in_both
def test_exact_levels_sum_over_all_copies(
    nodes: int, locals_: int, make: Callable[[int], Partition], dtype: torch.dtype
) -> None:
    partition = make(locals_)
    buckets = [integers(rank, partition.numel, dtype) for rank in range(nodes * locals_)]
    total = sum(bucket.float() for bucket in buckets) * 0.5

    def work(reducer: HybridReducer, rank: int) -> tuple[Tensor, Tensor]:
        return reduced_both_ways(reducer, buckets[rank], partition, 0.5)

    for rank, (scattered, everywhere) in enumerate(run_copies(nodes, locals_, FP32, work)):
        own = partition.owned_by(rank % locals_)
        assert torch.equal(everywhere, total.to(dtype))
        assert torch.equal(gather(scattered, own), gather(total.to(dtype), own))
        others = [segment for segment in partition.segments if segment.owner != rank % locals_]
        assert torch.equal(gather(scattered, others), gather(buckets[rank], others))


@pytest.mark.parametrize("codec", [Blockwise(4, 32), STOCHASTIC], ids=repr)
def test_all_copies_get_the_same_bits(codec: Compressor) -> None:
    partition = interleaved(2)

    def work(reducer: HybridReducer, rank: int) -> Tensor:
        bucket = torch.randn(partition.numel, generator=torch.Generator().manual_seed(rank))
        reducer.reduce_scatter(bucket, partition, 1.0)
        return gather(bucket, partition.owned_by(rank % 2))

    found = run_copies(3, 2, codec, work, feedback=True)
    for rank, part in enumerate(found):
        assert torch.equal(part, found[rank % 2])
    assert not torch.equal(found[0][:10], found[1][:10])


def test_each_rank_sends_only_its_part_between_nodes() -> None:
    partition = even_partition([("w", 400)], 2)

    def work(reducer: HybridReducer, rank: int) -> list[int]:
        return [transfer.bytes for transfer in reducer.transfers(partition, everywhere=False)]

    # Inside a node: half of the elements. Between nodes: half of the part in each direction.
    assert run_copies(2, 2, FP32, work) == [[800, 800]] * 4
