"""Second moments of islands: sums of blocks, scaling to the mean, and blocks that keep their own values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_compress.local_sgd.moments import SecondMoment, SecondMoments

HOST = torch.device("cpu")


def moments(views: list[Tensor], block_size: int = 4, correction: float = 1.0) -> SecondMoments:
    return SecondMoments(lambda: [SecondMoment(view, correction) for view in views], block_size, HOST)


def with_others(*others: tuple[Tensor, float]) -> Callable[[Tensor], Any]:
    """Return a handle that adds the sums and weights of other islands."""

    class Work:
        def wait(self) -> None:
            pass

    def start_sum(total: Tensor) -> Work:
        for sums, weight in others:
            total += torch.cat([sums * weight, torch.tensor([weight])])
        return Work()

    return start_sum


def test_blocks_do_not_cross_views() -> None:
    views = [torch.arange(6.0), torch.ones(4), torch.full((1,), 7.0)]
    assert moments(views).sums()[0].tolist() == [6.0, 9.0, 4.0, 7.0]


def test_a_block_keeps_its_proportions_and_gets_the_mean_sum() -> None:
    view = torch.tensor([1.0, 3.0, 0.0, 4.0, 2.0, 2.0])
    shared = moments([view]).start(with_others((torch.tensor([24.0, 0.0]), 1.0)), 1.0)
    shared.apply()
    assert view.tolist() == [2.0, 6.0, 0.0, 8.0, 1.0, 1.0]


def test_blocks_of_one_become_the_mean() -> None:
    view, other = torch.rand(37), torch.rand(37)
    mean = (3 * view + other) / 4
    moments([view], 1).start(with_others((other, 0.5)), 1.5).apply()
    torch.testing.assert_close(view, mean)


@pytest.mark.parametrize("nothing", [0.0, float("nan"), float("inf")])
def test_a_zero_or_non_finite_block_is_filled_evenly(nothing: float) -> None:
    view = torch.full((6,), nothing)
    moments([view]).start(with_others((torch.tensor([8.0, 2.0]), 1.0)), 0.0).apply()
    assert view.tolist() == [2.0, 2.0, 2.0, 2.0, 1.0, 1.0]


def test_an_island_with_a_non_finite_moment_is_excluded() -> None:
    shared = moments([torch.tensor([float("nan"), 1.0])], 1).start(with_others(), 1.0)
    assert shared.total.tolist() == [0.0, 0.0, 0.0]


def test_updates_made_during_the_exchange_are_kept() -> None:
    """Covers blocks that are zero everywhere and blocks with a small own value.

    Decay during the exchange adds nothing.
    """
    view = torch.tensor([0.0, 0.0, 1e-12, 0.0, 4.0, 0.0])
    shared = moments([view], 2).start(with_others((torch.tensor([0.0, 2.0, 8.0]), 1.0)), 1.0)
    view.copy_(torch.tensor([3.0, 1.0, 0.5, 0.5, 2.0, 1.0]))
    shared.apply()
    torch.testing.assert_close(view, torch.tensor([3.0, 1.0, 1.0, 1.0, 4.0, 2.0]))


def test_small_changes_of_the_mean_are_applied() -> None:
    """A beta2 of 0.999 changes a moment by a thousandth, which rounding would lose in every exchange."""
    view = torch.zeros(1)
    for _ in range(3000):
        view.mul_(0.999).add_(0.001)
        moments([view], 1).start(with_others((view.clone(), 1.0)), 1.0).apply()
    assert float(view) == pytest.approx(1 - 0.999**3000, rel=1e-4)


def test_sums_are_converted_to_the_bias_correction_of_each_island() -> None:
    old, new = torch.ones(4), torch.full((4,), 0.01)
    both = [moments([old], 4), moments([new], 4, correction=0.01)]
    sums = [own / corrections for own, corrections in (one.sums() for one in both)]
    for one, other in zip(both, reversed(sums), strict=True):
        one.start(with_others((other, 1.0)), 1.0).apply()
    torch.testing.assert_close(old, torch.ones(4))
    torch.testing.assert_close(new, torch.full((4,), 0.01))


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_single_island_changes_nothing(weight: float) -> None:
    view = torch.rand(9)
    before = view.clone()
    shared = moments([view]).start(lambda total: None, weight)
    shared.wait()
    shared.apply()
    assert torch.equal(view, before)


def test_moments_in_16_bits_and_empty_moments_are_supported() -> None:
    view = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    moments([view, torch.zeros(0)]).start(with_others((torch.tensor([9.0]), 1.0)), 1.0).apply()
    assert view.tolist() == [2.0, 4.0]
    assert moments([]).sums()[0].numel() == 0


def test_an_island_that_has_not_stepped_yet_is_excluded() -> None:
    view, other = torch.zeros(4), torch.full((1,), 8.0)
    shared = moments([view], correction=0.0).start(with_others((other, 1.0)), 1.0)
    assert shared.total.tolist() == [8.0, 1.0]
    shared.apply()
    assert view.tolist() == [0.0] * 4
    seen = torch.ones(4)
    moments([seen]).start(with_others((torch.zeros(1), 0.0)), 1.0).apply()
    assert seen.tolist() == [1.0] * 4


def test_blocks_that_are_zero_in_all_islands_stay_zero() -> None:
    view = torch.tensor([0.0, 5.0])
    moments([view], 1).start(with_others((torch.tensor([0.0, 0.0]), 1.0)), 0.0).apply()
    assert view.tolist() == [0.0, 5.0]


def test_nothing_changes_if_no_island_contributes() -> None:
    view = torch.rand(9)
    before = view.clone()
    moments([view]).start(with_others((torch.zeros(3), 0.0)), 0.0).apply()
    assert torch.equal(view, before)


def test_equal_islands_change_at_most_the_last_bit() -> None:
    view = torch.rand(1000) * 1e-12
    before = view.clone()
    own = moments([view], 128)
    own.start(with_others((own.sums()[0], 1.0)), 1.0).apply()
    torch.testing.assert_close(view, before, rtol=3e-7, atol=0.0)
