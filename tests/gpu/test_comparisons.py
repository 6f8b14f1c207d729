"""The comparison of kernels detects faulty ones, and accepts plain torch."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import reference
from tests.gpu import comparisons
from tests.gpu.comparisons import Comparison, awkward, check, same_bits, within
from tests.gpu.few_comparisons import wrong
from tests.gpu.operations import COMPARISONS, few
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


def test_the_fewest_rows_have_every_operation() -> None:
    assert {row.operation for row in few()} == {row.operation for row in COMPARISONS}
    assert len(few()) < len(COMPARISONS) / 2


def late_codes(x: Tensor, form: Any, numbers: Tensor, codes: Tensor, key: Any = None, memory: Any = None) -> None:
    """Flip one code behind the first tile."""
    reference.quantize_blocks(x, form, numbers, codes, key, memory)
    codes[2048:2049] ^= 1


def wrong_memory(x: Tensor, form: Any, numbers: Tensor, codes: Tensor, key: Any = None, memory: Any = None) -> None:
    """Ignore the residual."""
    reference.quantize_blocks(x, form, numbers, codes, key, None)
    if memory is not None:
        memory.after.copy_(memory.before)


def wrong_scales(x: Tensor, form: Any, numbers: Tensor, codes: Tensor, key: Any = None, memory: Any = None) -> None:
    """Make every scale one representable number too large."""
    reference.quantize_blocks(x, form, numbers, codes, key, memory)
    numbers.view({2: torch.int16, 4: torch.int32}[numbers.itemsize]).add_(1)


def forgetful(x: Tensor, form: Any, numbers: Tensor, codes: Tensor, key: Any = None, memory: Any = None) -> None:
    """Forget a residual that does not decay."""
    if memory is not None and memory.decay == 1.0:
        memory = replace(memory, before=torch.zeros_like(memory.before))
    reference.quantize_blocks(x, form, numbers, codes, key, memory)


def unsigned_factor(numbers: Tensor, codes: Tensor, form: Any, out: Tensor, scale: float) -> None:
    """Drop the sign of the factor."""
    reference.dequantize_blocks_add(numbers, codes, form, out, abs(scale))


def overwriting(numbers: Tensor, codes: Tensor, form: Any, out: Tensor, scale: float) -> None:
    """Overwrite the sum if the factor is 1."""
    if scale == 1.0:
        out.zero_()
    reference.dequantize_blocks_add(numbers, codes, form, out, scale)


def fused(numbers: Tensor, codes: Tensor, form: Any, out: Tensor, scale: float) -> None:
    """Round products and sums once instead of twice."""
    total = torch.zeros_like(out)
    reference.dequantize_blocks_add(numbers, codes, form, total, 1.0)
    out.copy_((out.double() + total.double() * scale).float())


def unsigned_cast(x: Tensor, out: Tensor) -> None:
    """Drop the sign of zeros."""
    reference.cast(x, out)
    out.add_(0.0)


def greedy(x: Tensor, out: Tensor) -> None:
    """Change an element of the input."""
    reference.cast(x, out)
    x[-1:] = 3.0


def unstable(rows: Tensor, k: int) -> Tensor:
    """Prefer the last column among equal magnitudes."""
    flipped = rows.shape[1] - 1 - reference.top_k_rows(rows.flip(1), k)
    return flipped.sort(dim=1).values


@pytest.mark.parametrize(
    ("operation", "planted_kernel"),
    [
        ("quantize_blocks", late_codes),
        ("quantize_blocks", wrong_memory),
        ("quantize_blocks", wrong_scales),
        ("quantize_blocks", forgetful),
        ("dequantize_blocks_add", unsigned_factor),
        ("dequantize_blocks_add", overwriting),
        ("dequantize_blocks_add", fused),
        ("cast", unsigned_cast),
        ("cast", greedy),
        ("top_k_rows", unstable),
        ("uniform", lambda count, key, device: reference.uniform(count, key + 1, device)),
        ("pack_bits", lambda values, width, out: reference.pack_bits(values.flip(0), width, out)),
    ],
)
def test_a_wrong_kernel_is_found(operation: str, planted_kernel: Callable[..., Any]) -> None:
    kernels = planted(**{operation: planted_kernel})
    assert any(row.differs(kernels, CPU, numel) for row in rows(operation) for numel in SIZES)


ORDINARY: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: x == 0,
    "equal numbers": lambda x: x == -3.5,
    "negative numbers": lambda x: (x < 0) & (x != -3.5) & x.isfinite(),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "denormal numbers": lambda x: (x.abs() < 1e-38) & x.any(),
    "huge numbers": lambda x: (x.abs() > 1e30) & x.isfinite().any(),
    "nan": torch.isnan,
    "inf": torch.isposinf,
    "-inf": torch.isneginf,
}
ALIKE = ORDINARY | OTHERS


@pytest.mark.parametrize(
    ("operation", "numbers"), [*(("cast", one) for one in ALIKE), *(("hadamard_tiles", one) for one in ORDINARY)]
)
def test_a_kernel_that_is_wrong_only_for_numbers_of_one_kind_is_found(operation: str, numbers: str) -> None:
    def wrong(x: Tensor, out: Tensor, *inverse: bool) -> None:
        getattr(reference, operation)(x, out, *inverse)
        if x.numel() and ALIKE[numbers](x).all():
            out.view(-1)[-1:] = 7.0

    row, kernels = rows(operation)[0], planted(**{operation: wrong})
    assert row.differs(kernels, CPU, 5000) == ""
    assert f"only {numbers}: " in row.differs_if_alike(kernels, CPU)


def test_a_difference_fails_unless_equal_bits_are_not_promised() -> None:
    row, kernels = rows("cast")[0], planted(cast=unsigned_cast)
    with pytest.raises(pytest.fail.Exception, match="result 0 differs"):
        compare(row, kernels)
    with pytest.raises(pytest.xfail.Exception, match="result 0 differs"):
        compare(replace(row, promised=False), kernels)


def test_few_comparisons_go_on_after_an_error() -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal\nmemory access")

    row = rows("cast")[0]
    assert wrong(row, reference, CPU) == ""
    assert wrong(row, planted(cast=broken), CPU) == "RuntimeError: an illegal memory access"
    assert "result 0 differs" in wrong(row, planted(cast=unsigned_cast), CPU)
    assert wrong(replace(row, promised=False), planted(cast=unsigned_cast), CPU) == ""


@pytest.mark.parametrize("numel", [0, 1, 700, 5000])
def test_numbers_are_awkward(numel: int) -> None:
    x = awkward(numel, CPU)
    assert x.numel() == numel
    if numel == 5000:
        assert all(bool(kind(x).any()) for kind in (torch.isnan, torch.isinf))
        assert bool(((x != 0) & (x.abs() < torch.finfo(torch.float32).tiny)).any())


def test_bits_are_compared_not_values() -> None:
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([torch.nan])
    assert same_bits([zero], [zero]) == same_bits([nan], [-nan]) == ""
    assert same_bits([zero], [-zero]) == "result 0 differs in 2 of 2, first at 0: 0.0 for -0.0"
    assert "1 of 2, first at 1" in same_bits([zero], [torch.tensor([0.0, 1.0000001])])
    assert "has (2,) entries for (1,)" in same_bits([zero], [zero[:1]])


def test_a_tolerance_is_of_the_largest() -> None:
    assert within(1e-3)([torch.tensor([100.05, 0.0])], [torch.tensor([100.0, 0.0])]) == ""
    assert "off by 1.0e-02" in within(1e-3)([torch.tensor([101.0])], [torch.tensor([100.0])])
