"""Compressed all-to-alls, with ranks as threads."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from deepspeed_compress.backends.activations.messages import (
    ActivationMessages,
    AllToAllCall,
    CompressedAllToAll,
    activation_codec,
)
from deepspeed_compress.monitor import Meter
from tests.support.reducers import normal, raw_bytes
from tests.support.threads import run_threads

ERRORS = {8: 0.01, 4: 0.15}
"""Largest relative errors of normal numbers."""
EQUAL = ([4, 4, 4],) * 3
UNEVEN = ([3, 0, 5], [1, 2, 4], [6, 1, 1])
"""Rows that each rank sends to every rank."""
WIDTH = (2, 67)


def inputs(rows: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32, shift: int = 0) -> list[Tensor]:
    count = WIDTH[0] * WIDTH[1]
    return [normal(rank + shift, sum(rows[rank]) * count).view(-1, *WIDTH).to(dtype) for rank in range(len(rows))]


def exchanged(rows: Sequence[Sequence[int]], bits: int, *batches: list[Tensor]) -> list[tuple[list[Tensor], Meter]]:
    """Return, for every rank, the outputs for `batches`, which have an input for each rank, and its counters."""

    def work(group: object, rank: int) -> tuple[list[Tensor], Meter]:
        meter = Meter()
        messages = ActivationMessages(activation_codec(bits), meter, "bytes_sequence_saved")
        exchange = CompressedAllToAll(group, messages)  # type: ignore[arg-type]  # torch calls it ProcessGroup
        received = [row[rank] for row in rows]
        pending, outputs = [], []
        for batch in batches:
            outputs.append(torch.empty(sum(received), *WIDTH, dtype=batch[rank].dtype))
            splits = (None, None) if rows == EQUAL else (received, rows[rank])
            pending.append(exchange.start(AllToAllCall(outputs[-1], batch[rank], *splits, group)))
        for one in pending:
            assert one.wait() is True
        return outputs, meter

    return run_threads(len(rows), work)


def expected(rows: Sequence[Sequence[int]], batch: list[Tensor], rank: int) -> Tensor:
    return torch.cat([one.split(list(row))[rank] for one, row in zip(batch, rows, strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", ERRORS)
@pytest.mark.parametrize("rows", [EQUAL, UNEVEN], ids=["equal", "uneven"])
def test_every_rank_gets_its_parts_in_order(rows: Sequence[list[int]], bits: int, dtype: torch.dtype) -> None:
    batch = inputs(rows, dtype)
    for rank, ((output,), meter) in enumerate(exchanged(rows, bits, batch)):
        wanted, received = expected(rows, batch, rank), [row[rank] for row in rows]
        for source, (found, exact) in enumerate(zip(output.split(received), wanted.split(received), strict=True)):
            if source == rank:
                assert torch.equal(found, exact)
            elif exact.numel():
                assert 0 < (found.float() - exact.float()).norm() < ERRORS[bits] * exact.float().norm()
        away = sum(rows[rank]) - rows[rank][rank]
        alone = away * WIDTH[0] * WIDTH[1] * dtype.itemsize
        assert meter.bytes_sequence + meter.bytes_sequence_saved == alone
        assert meter.bytes_sequence < (bits + 2) / 8 * alone / dtype.itemsize


@pytest.mark.parametrize("bits", ERRORS)
def test_a_repeated_exchange_has_the_same_bits(bits: int) -> None:
    """A recomputed layer exchanges after others have. Exchanges in progress do not mix."""
    first, other = inputs(EQUAL), inputs(EQUAL, shift=9)
    for outputs, _ in exchanged(EQUAL, bits, first, other, first):
        assert raw_bytes(outputs[0]) == raw_bytes(outputs[2])
        assert raw_bytes(outputs[0]) != raw_bytes(outputs[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bits", ERRORS)
def test_a_number_that_is_not_finite_reaches_its_receiver_alone(bits: int, bad: float) -> None:
    batch = inputs(EQUAL)
    batch[0].split(4)[2].view(-1)[5] = bad
    outputs = [output for (output,), _ in exchanged(EQUAL, bits, batch)]
    assert [bool(output.isfinite().all()) for output in outputs] == [True, True, False]
    assert not outputs[2].view(-1)[5].isfinite()


def test_an_empty_tensor_sends_nothing() -> None:
    rows = ([0, 0],) * 2
    for (output,), meter in exchanged(rows, 8, [torch.empty(0, *WIDTH)] * 2):
        assert (output.numel(), meter.bytes_sequence, meter.bytes_sequence_saved) == (0, 0, 0)
