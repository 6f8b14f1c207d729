"""Compressed exchanges of tokens, with ranks as threads."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_compress.backends.activations.tokens import (
    ExchangeTokens,
    Leg,
    Route,
    is_smaller,
    make_leg,
    row_bytes,
)
from deepspeed_compress.monitor import Meter
from tests.support.reducers import raw_bytes
from tests.support.threads import run_threads

ERRORS = {8: 0.012, 4: 0.2}
"""Largest relative errors of normal numbers, by bits."""
WIDTHS = (64, 100)
EQUAL = ((2, 2), (2, 2))
UNEQUAL = ((3, 0, 2), (1, 4, 0), (0, 0, 0))
"""Rows that each rank sends to each rank. The last one has no tokens."""


def tokens(rank: int, rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows of very different sizes."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(rows, width, generator=generator) * 10.0 ** torch.arange(rows)[:, None]
    return values.to(dtype)


def expected(inputs: Sequence[Tensor], plan: Sequence[Sequence[int]], rank: int) -> Tensor:
    """Return the rows that `rank` receives if nothing is rounded."""
    return torch.cat([torch.split(x, list(sent))[rank] for x, sent in zip(inputs, plan, strict=True)])


def run_plan(plan: Sequence[Sequence[int]], work: Callable[[Leg, Route, int, Meter], Any], bits: int) -> list[Any]:
    """Run `work` on all ranks of `plan`."""

    def start(group: Any, rank: int) -> Any:
        meter = Meter()
        route = Route(group, tuple(plan[rank]), tuple(sent[rank] for sent in plan))
        return work(make_leg(bits, meter), route, rank, meter)

    return run_threads(len(plan), start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("plan", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_rows_arrive_in_order_and_own_rows_are_exact(
    plan: Sequence[Sequence[int]], bits: int, width: int, dtype: torch.dtype
) -> None:
    inputs = [tokens(rank, sum(sent), width, dtype) for rank, sent in enumerate(plan)]

    def work(leg: Leg, route: Route, rank: int, meter: Meter) -> tuple[Tensor, Tensor, slice]:
        return leg.tokens(inputs[rank], route), leg.tokens(inputs[rank], route), route.own(route.received)

    for rank, (found, again, own) in enumerate(run_plan(plan, work, bits)):
        exact = expected(inputs, plan, rank)
        assert (found.shape, found.dtype, found.is_contiguous()) == (exact.shape, dtype, True)
        assert raw_bytes(found) == raw_bytes(again)
        assert torch.equal(found[own], exact[own])
        lost = (found.float() - exact.float()).norm(dim=1)
        assert (lost <= ERRORS[bits] * exact.float().norm(dim=1)).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_stays_in_its_token(bad: float, bits: int) -> None:
    inputs = [tokens(rank, 4, 100) for rank in range(2)]
    inputs[0][2, 99] = bad  # on its way to the other rank

    def work(leg: Leg, route: Route, rank: int, meter: Meter) -> Tensor:
        return leg.tokens(inputs[rank], route)

    mine, theirs = run_plan(EQUAL, work, bits)
    assert mine.isfinite().all()
    assert not theirs[0, 99].isfinite()
    assert theirs[0, :64].isfinite().all()
    assert theirs[1:].isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_gradients_take_the_way_back(bits: int) -> None:
    """With the received rows as gradients, every row returns near itself, rounded twice."""

    def work(leg: Leg, route: Route, rank: int, meter: Meter) -> tuple[Tensor, Tensor]:
        x = tokens(rank, sum(route.sent), 64).requires_grad_()
        found = ExchangeTokens.apply(x, leg, route)  # type: ignore[no-untyped-call]  # torch has no types here
        torch.autograd.backward(found, found.detach())
        assert x.grad is not None
        return x.detach(), x.grad

    for x, gradient in run_plan(UNEQUAL, work, bits):
        assert ((gradient - x).norm(dim=1) <= 2 * ERRORS[bits] * x.norm(dim=1)).all()


def test_a_second_derivative_is_refused() -> None:
    def work(leg: Leg, route: Route, rank: int, meter: Meter) -> None:
        x = tokens(rank, 4, 64).requires_grad_()
        found = ExchangeTokens.apply(x, leg, route)  # type: ignore[no-untyped-call]  # torch has no types here
        [gradient] = torch.autograd.grad(found.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.backward(gradient.sum())

    run_plan(EQUAL, work, 8)


@pytest.mark.parametrize(("bits", "width", "size"), [(8, 64, 66), (8, 65, 132), (4, 128, 68)])
def test_bytes_are_those_of_rows_for_other_ranks(bits: int, width: int, size: int) -> None:
    assert row_bytes(width, bits) == size

    def work(leg: Leg, route: Route, rank: int, meter: Meter) -> tuple[int, int]:
        leg.tokens(tokens(rank, sum(route.sent), width), route)
        return meter.bytes_experts, meter.bytes_experts_saved

    found = run_plan(UNEQUAL, work, bits)
    assert found == [(rows * size, rows * (4 * width - size)) for rows in (2, 1, 0)]


def test_only_what_shrinks_is_compressed() -> None:
    assert is_smaller(torch.empty(0, 64), 8)
    assert is_smaller(torch.empty(0, 33, dtype=torch.bfloat16), 4)
    assert not is_smaller(torch.empty(0, 33, dtype=torch.bfloat16), 8)
    assert not is_smaller(torch.empty(0, 64, dtype=torch.float64), 8)
    assert not is_smaller(torch.empty(0, 64, dtype=torch.int64), 8)
