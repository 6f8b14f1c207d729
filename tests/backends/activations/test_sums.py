"""Compressed sums over tensor-parallel ranks, with ranks as threads."""

import pytest
import torch
from torch import Tensor

from deepspeed_compress.backends.activations.messages import activation_codec, gradient_codec
from deepspeed_compress.backends.activations.sums import compressed_sum, sum_gradient
from deepspeed_compress.collectives.reducer import CHUNK_NUMEL, Run, StepClock
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.monitor import Meter, ring_all_reduce
from tests.support.reducers import normal, raw_bytes
from tests.support.threads import run_threads

CODECS = {"8 bits": gradient_codec(8), "4 bits": gradient_codec(4), "4 bits, rotated": activation_codec(4)}
ERRORS = {"8 bits": 0.012, "4 bits": 0.2, "4 bits, rotated": 0.2}
"""Largest relative errors of a sum of normal numbers."""
SHAPE = (3, 5, 67)
"""Shape of an activation, whose elements divide evenly into neither ranks nor blocks."""


def activation(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return normal(rank, 3 * 5 * 67).view(SHAPE).to(dtype)


def sums(ranks: int, codec: Codec, *inputs: list[Tensor]) -> list[tuple[list[Tensor], Meter]]:
    """Return, for every rank, the sums of `inputs`, which have a tensor for each rank, and its counters."""

    def work(group: object, rank: int) -> tuple[list[Tensor], Meter]:
        run = Run(StepClock(), Meter())
        total = compressed_sum(group, codec, run)  # type: ignore[arg-type]
        return [total(tensors[rank]) for tensors in inputs], run.meter

    return run_threads(ranks, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_get_equal_bits_near_the_sum(ranks: int, kind: str, dtype: torch.dtype) -> None:
    inputs = [activation(rank, dtype) for rank in range(ranks)]
    before = [one.clone() for one in inputs]
    found = [total for (total,), _ in sums(ranks, CODECS[kind], inputs)]
    exact = torch.stack([one.float() for one in inputs]).sum(0)
    for total in found:
        assert (total.shape, total.dtype) == (torch.Size(SHAPE), dtype)
        assert raw_bytes(total) == raw_bytes(found[0])
        assert (total.float() - exact).norm() < ERRORS[kind] * exact.norm()
    assert all(torch.equal(one, same) for one, same in zip(inputs, before, strict=True))


@pytest.mark.parametrize("kind", CODECS)
def test_a_repeated_sum_has_the_same_bits(kind: str) -> None:
    """A recomputed layer sums after others have been summed."""
    first, other = ([activation(rank + shift) for rank in range(2)] for shift in (0, 9))
    for totals, _ in sums(2, CODECS[kind], first, other, first):
        assert raw_bytes(totals[0]) == raw_bytes(totals[2])
        assert raw_bytes(totals[0]) != raw_bytes(totals[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("element", [0, -1])
def test_a_number_that_is_not_finite_reaches_every_rank(kind: str, bad: float, element: int) -> None:
    inputs = [activation(rank) for rank in range(2)]
    inputs[1].view(-1)[element] = bad
    (one,), (two,) = (totals for totals, _ in sums(2, CODECS[kind], inputs))
    assert not one.view(-1)[element].isfinite()
    assert raw_bytes(one) == raw_bytes(two)


def test_an_input_need_not_be_contiguous() -> None:
    inputs = [activation(rank).transpose(0, 2) for rank in range(2)]
    (strided,), _ = sums(2, gradient_codec(8), inputs)[0]
    (packed,), _ = sums(2, gradient_codec(8), [one.contiguous() for one in inputs])[0]
    assert torch.equal(strided, packed)
    assert strided.is_contiguous()


def test_an_empty_input_sends_nothing() -> None:
    for (total,), meter in sums(1, gradient_codec(8), [torch.empty(2, 0, 64)]):
        assert (total.shape, meter.bytes_tensor) == ((2, 0, 64), 0)


def test_a_type_that_is_not_compressed_is_summed_exactly_and_counted() -> None:
    inputs = [activation(rank, torch.float64) for rank in range(2)]
    for (total,), meter in sums(2, gradient_codec(8), inputs):
        assert torch.equal(total, inputs[0] + inputs[1])
        assert (meter.bytes_tensor, meter.bytes_tensor_saved) == (ring_all_reduce(inputs[0].nbytes, 2), 0)


def test_bytes_are_those_sent_and_those_that_an_all_reduce_would_add() -> None:
    inputs = [normal(rank, 4 * 16 * 64).view(4, 16, 64).bfloat16() for rank in range(2)]
    for _, meter in sums(2, gradient_codec(8), inputs):
        share = 4 * 16 * 64 // 2
        assert meter.bytes_tensor == 2 * (share + share // 64 * 2)
        assert meter.bytes_tensor + meter.bytes_tensor_saved == ring_all_reduce(inputs[0].nbytes, 2)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_second_derivatives_are_those_of_all_reduces(ranks: int, dtype: torch.dtype) -> None:
    """Ranks compute the same from a summed gradient, so its derivative passes unchanged, and is summed in turn."""

    def work(group: object, rank: int) -> tuple[Tensor, Tensor]:
        total = compressed_sum(group, gradient_codec(8), Run(StepClock(), Meter()))  # type: ignore[arg-type]
        x = activation(0, dtype).requires_grad_()
        (first,) = torch.autograd.grad(sum_gradient(x, total).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return x.detach(), second

    for x, second in run_threads(ranks, work):
        expected = ranks * 6 * x.float()
        assert (second.float() - expected).norm() < ERRORS["8 bits"] * expected.norm()


@pytest.mark.parametrize("shape", [(), (CHUNK_NUMEL["cpu"] + 65,)], ids=["one number", "two chunks"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_one_number_and_of_several_chunks(ranks: int, shape: tuple[int, ...]) -> None:
    inputs = [normal(rank, max(1, sum(shape))).view(shape) for rank in range(ranks)]
    exact = torch.stack(inputs).sum(0)
    found = [total for (total,), _ in sums(ranks, gradient_codec(8), inputs)]
    for total in found:
        assert total.shape == exact.shape
        assert torch.equal(total, found[0])
        assert (total - exact).norm() < ERRORS["8 bits"] * exact.norm()
