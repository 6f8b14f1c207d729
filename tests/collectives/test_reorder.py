"""Conversion of a sharded flat buffer between two orders of its parameters."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.reorder import Reordering
from tests.support.threads import run_threads

BEFORE = (("a", 7), ("b", 40), ("c", 1), ("d", 13), ("empty", 0))
AFTER = (("d", 13), ("b", 40), ("empty", 0), ("c", 1), ("a", 7))
CPU = torch.device("cpu")


def buffer(order: Sequence[tuple[str, int]], numel: int, dtype: torch.dtype) -> Tensor:
    """Return a buffer whose elements encode their parameter and their index in it. Padding is 0."""
    parts = [100 * (1 + ord(name[0]) - ord("a")) + torch.arange(size) for name, size in order]
    joined = torch.cat(parts)
    return torch.cat([joined, joined.new_zeros(numel - joined.numel())]).to(dtype)


def reorder(group: ProcessGroup, rank: int, share: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    reordering = Reordering(group, BEFORE, AFTER, share)
    part = buffer(BEFORE, share * group.size(), dtype)[rank * share : (rank + 1) * share]
    there = reordering.forward(part, CPU)
    return there, reordering.backward(there, CPU)


@pytest.mark.parametrize(("ranks", "share"), [(1, 61), (2, 32), (3, 21), (4, 16), (4, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_element_moves_to_its_place_and_back(ranks: int, share: int, dtype: torch.dtype) -> None:
    found = run_threads(ranks, lambda group, rank: reorder(group, rank, share, dtype))
    assert torch.equal(torch.cat([there for there, _ in found]), buffer(AFTER, ranks * share, dtype))
    assert torch.equal(torch.cat([back for _, back in found]), buffer(BEFORE, ranks * share, dtype))


def test_orders_with_different_parameters_are_refused() -> None:
    with pytest.raises(AssertionError, match="different parameters"):
        run_threads(1, lambda group, rank: Reordering(group, BEFORE, AFTER[1:], 61))
