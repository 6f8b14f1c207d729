"""Layout of gradients in the buckets of FSDP2, compared with the copies that torch makes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_reduce_scatter_copy_in

from deepspeed_compress.backends.fsdp2.gradients import find_layout
from tests.support.properties import properties

shapes = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


def padded(shape: tuple[int, ...], ranks: int) -> int:
    return math.ceil(shape[0] / ranks) * ranks * math.prod(shape[1:])


@properties
@given(shapes, st.integers(1, 5), st.booleans())
def test_segments_match_the_copies_of_torch(found: list[tuple[int, ...]], ranks: int, whole: bool) -> None:
    gradients, first = [], 1
    for shape in found:
        # Every element has a number of its own, and padding is 0.
        gradients.append(torch.arange(first, first + math.prod(shape), dtype=torch.float32).view(shape))
        first += math.prod(shape)
    buffer = torch.empty(sum(padded(shape, ranks) for shape in found))
    foreach_reduce_scatter_copy_in(list(gradients), buffer, ranks)
    sizes = tuple((str(number), shape) for number, shape in enumerate(found))
    layout = find_layout(sizes, ranks, whole)
    assert layout.numel == buffer.numel()
    bucket = layout.bucket(buffer)
    for segment in layout.partition.segments:
        expected = gradients[int(segment.parameter)].flatten()[segment.begin : segment.begin + segment.numel]
        assert torch.equal(bucket[segment.offset : segment.offset + segment.numel], expected)
    parts = buffer.view(ranks, -1)
    for rank in range(ranks):
        out = torch.full_like(parts[rank], torch.nan)
        layout.hand_over(bucket, rank, out)
        assert torch.equal(out, parts[rank])


def test_whole_parameters_stand_one_after_the_other() -> None:
    layout = find_layout((("a", (4, 2)), ("b", (3,))), 2, whole=True)
    assert [segment.parameter for segment in layout.partition.segments] == ["a", "a", "b", "b"]
    assert [segment.owner for segment in layout.partition.segments] == [0, 1, 0, 1]


@pytest.mark.parametrize("shape", [(4, 3), (8,)])
def test_without_padding_the_buffer_is_the_bucket(shape: tuple[int, ...]) -> None:
    buffer = torch.arange(float(math.prod(shape)))
    assert find_layout((("a", shape),), 2, whole=False).bucket(buffer) is buffer
