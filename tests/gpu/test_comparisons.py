"""The comparison of kernels detects faulty ones, and accepts plain torch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.kernels.arguments import BEGIN, NUMEL
from tests.gpu import comparisons
from tests.gpu.comparisons import Comparison, check, same_bits
from tests.gpu.operations import COMPARISONS
from tests.support.kernels import operations

CPU = torch.device("cpu")
SIZES = (0, 1, 65, 2049, 5000)


def planted(**wrong: Callable[..., Any]) -> SimpleNamespace:
    """Return plain torch with the faulty operations `wrong`."""
    return SimpleNamespace(**{name: getattr(reference, name) for name in operations(reference)} | wrong)


def compare(row: Comparison, kernels: Any, sizes: tuple[int, ...] = SIZES) -> dict[str, object]:
    """Return the recorded properties of a comparison."""
    found: dict[str, object] = {}
    check(row, kernels, CPU, sizes, found.__setitem__)
    return found


def rows(operation: str) -> list[Comparison]:
    return [row for row in COMPARISONS if row.operation == operation]


@pytest.mark.parametrize("row", COMPARISONS, ids=lambda row: row.name)
def test_plain_torch_is_as_plain_torch(row: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are also compared in chunks, for which a part of the vector must give a part of the results."""
    assert compare(row, reference) == {"goal": "as plain torch", "figure": "5 sizes up to 5,000"}
    if row.large:
        monkeypatch.setattr(comparisons, "CHUNK", 2 * max(row.unit, 512))
        compare(row, reference, (9001,))


def test_every_operation_has_a_row() -> None:
    assert {row.operation for row in COMPARISONS} == operations(reference) - {"unpack_bits", "unpack_codes"} | {
        "compressor"
    }


def late_codes(x: Tensor, at: int, form: Any, out: Tensor, table: Any, *options: Any) -> None:
    """Flip one code behind the first tile."""
    reference.quantize_messages(x, at, form, out, table, *options)
    begin = form.scale_bytes(x.numel())
    out[begin + 2048 : begin + 2049] ^= 1


def wrong_memory(x: Tensor, at: int, form: Any, out: Tensor, table: Any, keys: Any, memory: Any) -> None:
    """Ignore the residual."""
    reference.quantize_messages(x, at, form, out, table, keys, None)
    if memory is not None:
        memory.after.copy_(memory.before)


def wrong_scales(x: Tensor, at: int, form: Any, out: Tensor, table: Any, *options: Any) -> None:
    """Make every scale one representable number too large."""
    reference.quantize_messages(x, at, form, out, table, *options)
    integers = {2: torch.int16, 4: torch.int32}[form.scale_dtype.itemsize]
    for row in table.values:
        out[row[BEGIN] : row[BEGIN] + form.scale_bytes(row[NUMEL])].view(integers).add_(1)


def fused(payloads: Tensor, form: Any, table: Any, out: Tensor, at: int, scale: float, add: bool) -> None:
    """Round products and sums once instead of twice."""
    total = torch.zeros_like(out)
    reference.dequantize_messages(payloads, form, table, total, at, 1.0, False)
    out.copy_((out.double() + total.double() * scale).float())


def unsigned_cast(x: Tensor, out: Tensor) -> None:
    """Drop the sign of zeros."""
    reference.cast(x, out)
    out.add_(0.0)


def unstable(rows: Tensor, k: int) -> Tensor:
    """Prefer the last column among equal magnitudes."""
    flipped = rows.shape[1] - 1 - reference.top_k_rows(rows.flip(1), k)
    return flipped.sort(dim=1).values


@pytest.mark.parametrize(
    ("operation", "planted_kernel"),
    [
        ("quantize_messages", late_codes),
        ("quantize_messages", wrong_memory),
        ("quantize_messages", wrong_scales),
        ("dequantize_messages", fused),
        ("cast", unsigned_cast),
        ("top_k_rows", unstable),
        ("uniform", lambda count, key, device: reference.uniform(count, key + 1, device)),
        ("pack_bits", lambda values, width, out: reference.pack_bits(values.flip(0), width, out)),
    ],
)
def test_a_wrong_kernel_is_found(operation: str, planted_kernel: Callable[..., Any]) -> None:
    kernels = planted(**{operation: planted_kernel})
    assert any(row.differs(kernels, CPU, numel) for row in rows(operation) for numel in SIZES)


ALIKE: dict[str, Callable[[Tensor], Tensor]] = {"-inf": torch.isneginf, "zeros": lambda x: x == 0}


@pytest.mark.parametrize(("operation", "numbers"), [("cast", "-inf"), ("hadamard_tiles", "zeros")])
def test_a_kernel_that_is_wrong_only_for_numbers_of_one_kind_is_found(operation: str, numbers: str) -> None:
    def wrong(x: Tensor, out: Tensor, *inverse: bool) -> None:
        getattr(reference, operation)(x, out, *inverse)
        if x.numel() and ALIKE[numbers](x).all():
            out.view(-1)[-1:] = 7.0

    row, kernels = rows(operation)[0], planted(**{operation: wrong})
    assert row.differs(kernels, CPU, 5000) == ""
    assert f"only {numbers}: " in row.differs_if_alike(kernels, CPU)


def test_bits_are_compared_not_values() -> None:
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([torch.nan])
    assert same_bits([zero], [zero]) == same_bits([nan], [-nan]) == ""
    assert same_bits([zero], [-zero]) == "result 0 differs in 2 of 2, first at 0: 0.0 for -0.0"
    assert "1 of 2, first at 1" in same_bits([zero], [torch.tensor([0.0, 1.0000001])])
    assert "has (2,) entries for (1,)" in same_bits([zero], [zero[:1]])
