"""Second moments of islands: sums of blocks, what becomes of them, and what is left to each island."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_compress.communication.moments import Moments

HOST = torch.device("cpu")


def moments(views: list[Tensor], block_size: int = 4) -> Moments:
    return Moments(lambda: views, block_size, HOST)


def with_others(*others: tuple[Tensor, float]) -> Callable[[Tensor], Any]:
    """Adds the sums of others, and their weights."""

    class Work:
        def wait(self) -> None:
            pass

    def add_up(total: Tensor) -> Work:
        for sums, weight in others:
            total += torch.cat([sums * weight, torch.tensor([weight])])
        return Work()

    return add_up


def test_blocks_end_with_their_view() -> None:
    views = [torch.arange(6.0), torch.ones(4), torch.full((1,), 7.0)]
    assert moments(views).sums().tolist() == [6.0, 9.0, 4.0, 7.0]


def test_a_block_keeps_its_shape_and_gets_the_mean_of_the_sums() -> None:
    view = torch.tensor([1.0, 3.0, 0.0, 4.0, 2.0, 2.0])
    shared = moments([view]).start(with_others((torch.tensor([24.0, 0.0]), 1.0)), 1.0)
    shared.apply()
    assert view.tolist() == [2.0, 6.0, 0.0, 8.0, 1.0, 1.0]


def test_blocks_of_one_become_the_mean() -> None:
    view, other = torch.rand(37), torch.rand(37)
    mean = (3 * view + other) / 4
    moments([view], 1).start(with_others((other, 0.5)), 1.5).apply()
    torch.testing.assert_close(view, mean, rtol=1e-2, atol=0.0)


@pytest.mark.parametrize("nothing", [0.0, float("nan"), float("inf")])
def test_what_is_nothing_or_not_finite_gets_the_mean_evenly(nothing: float) -> None:
    view = torch.full((6,), nothing)
    moments([view]).start(with_others((torch.tensor([8.0, 2.0]), 1.0)), 0.0).apply()
    assert view.tolist() == [2.0, 2.0, 2.0, 2.0, 1.0, 1.0]


def test_what_is_not_finite_does_no_harm_to_others() -> None:
    shared = moments([torch.tensor([float("nan"), 1.0])], 1).start(with_others(), 1.0)
    assert shared.total.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_alone_nothing_changes(weight: float) -> None:
    view = torch.rand(9)
    before = view.clone()
    shared = moments([view]).start(lambda total: None, weight)
    shared.wait()
    shared.apply()
    assert torch.equal(view, before)


def test_where_nobody_counts_nothing_changes() -> None:
    view = torch.rand(9)
    before = view.clone()
    moments([view]).start(with_others((torch.zeros(3), 0.0)), 0.0).apply()
    assert torch.equal(view, before)


def test_equal_islands_change_nothing_but_by_the_rounding_to_sixteen_bits() -> None:
    view = torch.rand(1000) * 1e-12
    before = view.clone()
    own = moments([view], 128)
    own.start(with_others((own.sums(), 1.0)), 1.0).apply()
    torch.testing.assert_close(view, before, rtol=5e-3, atol=0.0)


def test_sixteen_bits_and_nothing_at_all() -> None:
    view = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    moments([view, torch.zeros(0)]).start(with_others((torch.tensor([9.0]), 1.0)), 1.0).apply()
    assert view.tolist() == [2.0, 4.0]
    assert moments([]).sums().numel() == 0
