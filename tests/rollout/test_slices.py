"""Slices of rows: what ranks hold is divided evenly, and a receiver refuses rows that a parameter does not have."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_compress.errors import RolloutError, UnsupportedError
from deepspeed_compress.rollout.module_weights import ModuleWeights
from deepspeed_compress.rollout.parts import SliceDigest
from deepspeed_compress.rollout.shares import Share, digest_slice, make_manifest
from deepspeed_compress.rollout.slices import Slice, find_holders, find_shares, rectangle
from deepspeed_compress.rollout.versions import Chain

WHOLE = torch.arange(6 * 10.0).view(6, 10)


def place(one: Slice) -> Tensor:
    """Return a tensor like `WHOLE` with the values of a slice in their place, and -1 elsewhere."""
    found = torch.full_like(WHOLE, -1)
    width = one.values.shape[1]
    found.view(-1).as_strided((one.rows, width), (one.stride or width, 1), one.start).copy_(one.values)
    return found


@pytest.mark.parametrize("begin", range(24))
def test_a_cut_has_the_elements_in_the_order_of_rows(begin: int) -> None:
    part = rectangle("weight", (6, 10), 1, 3, WHOLE[1:5, 3:9])
    for numel in range(25 - begin):
        pieces = list(part.cut(begin, numel))
        found = torch.cat([piece.values.reshape(-1) for piece in pieces]) if pieces else torch.empty(0)
        assert torch.equal(found, part.values.reshape(-1)[begin : begin + numel])
        assert len(pieces) <= 3
        for piece in pieces:
            placed = place(piece)
            assert torch.equal(placed[placed >= 0], WHOLE[placed >= 0])


def held(rank: int) -> list[Slice]:
    """Return what a rank holds of two columns of ranks, with three ranks that hold the first one."""
    columns = WHOLE[:, :4] if rank < 3 else WHOLE[:, 4:]
    return [rectangle("weight", (6, 10), 0, 0 if rank < 3 else 4, columns)]


def digests(skipped: int | None = None) -> list[SliceDigest]:
    holders = find_holders([[one.region for one in held(rank)] for rank in range(4)])
    shares = [find_shares(held(rank), holders, rank) for rank in range(4) if rank != skipped]
    return [digest_slice(replace(one, values=one.values.flatten())) for share in shares for one in share]


def manifest(slices: list[SliceDigest]) -> Any:
    return make_manifest(Chain(0, "0" * 64, 0, ""), "fp32", [Share({"weight": (6, 10)}, slices, None, (), 0.0, 0.0)])


def test_ranks_that_hold_the_same_rows_publish_an_even_share_each() -> None:
    found = digests()
    assert sum(one.numel for one in found) == 60
    assert sum(one.numel for one in found if one.start % 10 < 4) == 24
    assert manifest(found).tensors == {"weight": (6, 10)}


@pytest.mark.parametrize("skipped", range(4))
def test_a_part_that_no_rank_publishes_is_an_error(skipped: int) -> None:
    with pytest.raises(UnsupportedError, match='elements of "weight" twice or not at all'):
        manifest(digests(skipped))


@pytest.mark.parametrize(
    "rows",
    [{"rows": 7, "stride": 10}, {"rows": 2, "stride": 3}, {"rows": 5, "stride": 10}],
    ids=str,
)
def test_rows_that_a_parameter_does_not_have_are_refused(rows: dict[str, int]) -> None:
    module = nn.Linear(10, 6, bias=False)
    weights = ModuleWeights(module, manifest(digests()))
    with pytest.raises(RolloutError, match='of an unknown "weight"'):
        weights._place(SliceDigest("weight", 0, 28, "0" * 64, **rows))
