"""Hybrid reduction with ranks as threads, compared with explicit sums."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import Partition, even_partition
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.collectives.two_level import HybridReducer
from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor
from deepspeed_compress.compression.segments import gather
from deepspeed_compress.monitor import Meter
from tests.support.reducers import integers, interleaved, payload_reducer, reduced_both_ways
from tests.support.threads import run_nodes

T = TypeVar("T")
FP32 = Cast(torch.float32)
STOCHASTIC = Blockwise(8, 32, stochastic=True)
every_shape = pytest.mark.parametrize(("nodes", "locals_"), [(2, 2), (2, 3), (3, 2), (3, 1)])


def run_copies(
    nodes: int, locals_: int, between: Compressor, work: Callable[[HybridReducer, int], T], feedback: bool = False
) -> list[T]:
    """Run `work(reducer, rank)` on every rank, with rank = node * locals_ + local."""

    def on_rank(whole: ProcessGroup, inner: ProcessGroup, outer: ProcessGroup, rank: int) -> T:
        levels = [
            payload_reducer(one, codec, Run(StepClock(), Meter()), feedback)
            for one, codec in ((inner, FP32), (outer, between))
        ]
        return work(HybridReducer(*levels), rank)

    return run_nodes(nodes, locals_, on_rank)


@every_shape
@pytest.mark.parametrize("make", [interleaved, lambda ranks: even_partition([("w", 101), ("b", 3)], ranks)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_levels_sum_over_all_ranks(
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
