import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_compress.collectives.buckets import Partition, even_partition, partition_by_sizes, select
from deepspeed_compress.compression.segments import Segment, gather, scatter
from tests.support.properties import properties

SIZES = st.lists(st.integers(0, 40), max_size=8).map(
    lambda numels: [(f"p{index}", numel) for index, numel in enumerate(numels)]
)
RANKS = st.integers(1, 6)


@st.composite
def parts(draw: st.DrawFn) -> tuple[list[tuple[str, list[tuple[int, int]]]], int]:
    """Generate parameters cut into (owner, numel) runs, some of them empty, and the number of ranks."""
    ranks = draw(RANKS)
    runs = st.lists(st.tuples(st.integers(0, ranks - 1), st.integers(0, 9)), max_size=5)
    return [(f"p{index}", owners) for index, owners in enumerate(draw(st.lists(runs, max_size=6)))], ranks


def elements(partition: Partition) -> list[tuple[str, int]]:
    """Return (parameter, element) for every position of the bucket."""
    return [(s.parameter, s.begin + index) for s in partition.segments for index in range(s.numel)]


def owners(partition: Partition) -> list[int]:
    return [segment.owner for segment in partition.segments for _ in range(segment.numel)]


@properties
@given(SIZES, RANKS)
def test_even_partition_covers_every_element_in_order(sizes: list[tuple[str, int]], ranks: int) -> None:
    partition = even_partition(sizes, ranks)
    assert elements(partition) == [(name, index) for name, numel in sizes for index in range(numel)]
    assert partition.numel == sum(numel for _, numel in sizes)
    assert all(segment.numel for segment in partition.segments)


@properties
@given(SIZES, RANKS)
def test_even_partition_gives_near_equal_shares_in_rank_order(sizes: list[tuple[str, int]], ranks: int) -> None:
    found = owners(even_partition(sizes, ranks))
    share, larger = divmod(len(found), ranks)
    assert found == sorted(found)
    assert [found.count(rank) for rank in range(ranks)] == [share + (rank < larger) for rank in range(ranks)]


@properties
@given(parts())
def test_partition_by_sizes_assigns_every_run_to_its_owner(
    case: tuple[list[tuple[str, list[tuple[int, int]]]], int],
) -> None:
    parameters, ranks = case
    partition = partition_by_sizes(parameters, ranks)
    totals = [(name, sum(numel for _, numel in runs)) for name, runs in parameters]
    assert elements(partition) == [(name, index) for name, numel in totals for index in range(numel)]
    assert owners(partition) == [owner for _, runs in parameters for owner, numel in runs for _ in range(numel)]
    assert all(segment.numel for segment in partition.segments)


@properties
@given(parts())
def test_gather_returns_the_elements_of_an_owner_in_bucket_order(
    case: tuple[list[tuple[str, list[tuple[int, int]]]], int],
) -> None:
    partition = partition_by_sizes(*case)
    bucket = torch.arange(partition.numel, dtype=torch.float32)
    for rank in range(partition.world_size):
        expected = [float(index) for index, owner in enumerate(owners(partition)) if owner == rank]
        assert gather(bucket, partition.owned_by(rank)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@properties
@given(parts())
def test_scatter_inverts_gather_and_keeps_other_elements(
    dtype: torch.dtype, case: tuple[list[tuple[str, list[tuple[int, int]]]], int]
) -> None:
    partition = partition_by_sizes(*case)
    bucket = torch.arange(partition.numel).to(dtype)
    restored = torch.full_like(bucket, -1)
    for rank in range(partition.world_size):
        scatter(gather(bucket, partition.owned_by(rank)), partition.owned_by(rank), restored)
        expected = [float(i) if owner <= rank else -1.0 for i, owner in enumerate(owners(partition))]
        assert restored.tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("segments", [(), (Segment("p", 0, 4, 0, 0),)], ids=["none", "one"])
def test_gather_returns_a_new_fp32_tensor(dtype: torch.dtype, segments: tuple[Segment, ...]) -> None:
    bucket = torch.ones(4, dtype=dtype)
    gathered = gather(bucket, segments)
    assert gathered.dtype == torch.float32
    assert gathered.numel() == sum(segment.numel for segment in segments)
    gathered.zero_()
    assert bucket.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([Segment("p", 0, 2, 0, 0), Segment("p", 2, 2, 3, 0)], "gap"),
        ([Segment("p", 0, 2, 0, 0), Segment("p", 2, 2, 1, 0)], "overlap"),
        ([Segment("p", 0, 2, 0, 2)], "outside the group of 2"),
        ([Segment("p", 0, 2, 0, -1)], "outside the group of 2"),
    ],
    ids=["gap", "overlap", "owner", "negative owner"],
)
def test_invalid_segments_are_refused(segments: list[Segment], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        Partition(tuple(segments), 2)


def test_equal_partitions_are_equal_keys() -> None:
    first, second = (even_partition([("a", 3), ("b", 4)], 2) for _ in range(2))
    assert len({first, second, even_partition([("a", 4), ("b", 3)], 2)}) == 2


@properties
@given(parts(), st.integers(1, 3))
def test_select_forms_a_sub_bucket_of_the_same_segments(
    case: tuple[list[tuple[str, list[tuple[int, int]]]], int], every: int
) -> None:
    partition = partition_by_sizes(*case)

    def keep(segment: Segment) -> bool:
        return (segment.begin + segment.owner) % every == 0

    kept, part = select(partition, keep)
    assert kept == tuple(segment for segment in partition.segments if keep(segment))
    assert part.world_size == partition.world_size
    bucket = torch.arange(partition.numel, dtype=torch.float32)
    sub_bucket = gather(bucket, kept)
    assert part.numel == sub_bucket.numel()
    for before, after in zip(kept, part.segments, strict=True):
        same = ("parameter", "begin", "numel", "owner")
        assert [getattr(before, name) for name in same] == [getattr(after, name) for name in same]
        assert gather(sub_bucket, [after]).tolist() == gather(bucket, [before]).tolist()
