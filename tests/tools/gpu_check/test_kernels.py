"""Part 1 finds what is wrong with kernels, and nothing where they are plain torch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.tools.gpu_check import compared, kernels
from deepspeed_compress.tools.gpu_check.compared import Comparison, awkward, same_bits, within
from deepspeed_compress.tools.gpu_check.operations import COMPARISONS

CPU = torch.device("cpu")
SIZES = (0, 1, 65, 2049, 5000)


def planted(**wrong: Callable[..., Any]) -> SimpleNamespace:
    """Plain torch, but for `wrong`."""
    return SimpleNamespace(**{name: getattr(reference, name) for name in reference.__all__} | wrong)


def rows(operation: str) -> list[Comparison]:
    return [row for row in COMPARISONS if row.operation == operation]


@pytest.mark.parametrize("row", COMPARISONS, ids=lambda row: row.name)
def test_plain_torch_is_as_plain_torch(row: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks too, so that a part of the vector gives a part of the results."""
    assert kernels.compare(row, reference, CPU, SIZES).verdict == "pass"
    if row.large:
        monkeypatch.setattr(compared, "CHUNK", 2 * max(row.unit, 512))
        assert kernels.compare(row, reference, CPU, (9001,)).verdict == "pass"


def test_every_operation_has_a_row() -> None:
    assert {row.operation for row in COMPARISONS} == {*reference.__all__} - {"unpack_bits", "unpack_codes"} | {
        "compressor"
    }


def late_codes(x: Tensor, form: Any, numbers: Tensor, codes: Tensor, key: Any = None, memory: Any = None) -> None:
    """One code is wrong, behind the first tile."""
    reference.quantize_blocks(x, form, numbers, codes, key, memory)
    codes[2048:2049] ^= 1


def wrong_memory(x: Tensor, form: Any, numbers: Tensor, codes: Tensor, key: Any = None, memory: Any = None) -> None:
    """The memory is not added."""
    reference.quantize_blocks(x, form, numbers, codes, key, None)
    if memory is not None:
        memory.after.copy_(memory.before)


def wrong_scales(x: Tensor, form: Any, numbers: Tensor, codes: Tensor, key: Any = None, memory: Any = None) -> None:
    """Every scale is one number too large."""
    reference.quantize_blocks(x, form, numbers, codes, key, memory)
    numbers.view({2: torch.int16, 4: torch.int32}[numbers.itemsize]).add_(1)


def fused(numbers: Tensor, codes: Tensor, form: Any, out: Tensor, scale: float) -> None:
    """Products and sums are rounded once, not each."""
    total = torch.zeros_like(out)
    reference.dequantize_blocks_add(numbers, codes, form, total, 1.0)
    out.copy_((out.double() + total.double() * scale).float())


def unsigned_cast(x: Tensor, out: Tensor) -> None:
    """Zeros lose their sign."""
    reference.cast(x, out)
    out.add_(0.0)


def greedy(x: Tensor, out: Tensor) -> None:
    """What is read is changed."""
    reference.cast(x, out)
    x[-1:] = 3.0


def unstable(rows: Tensor, k: int) -> Tensor:
    """Of equal magnitudes the last column wins."""
    flipped = rows.shape[1] - 1 - reference.top_k_rows(rows.flip(1), k)
    return flipped.sort(dim=1).values


@pytest.mark.parametrize(
    ("operation", "wrong"),
    [
        ("quantize_blocks", late_codes),
        ("quantize_blocks", wrong_memory),
        ("quantize_blocks", wrong_scales),
        ("dequantize_blocks_add", fused),
        ("cast", unsigned_cast),
        ("cast", greedy),
        ("top_k_rows", unstable),
        ("uniform", lambda count, key, device: reference.uniform(count, key + 1, device)),
        ("pack_bits", lambda values, width, out: reference.pack_bits(values.flip(0), width, out)),
    ],
)
def test_a_wrong_kernel_is_found(operation: str, wrong: Callable[..., Any]) -> None:
    found = [kernels.compare(row, planted(**{operation: wrong}), CPU, SIZES) for row in rows(operation)]
    failed = [one for one in found if one.verdict == "fail"]
    assert failed
    assert all(one.why and "elements" in one.figure for one in failed)


def test_a_kernel_that_raises_is_a_finding() -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal memory access")

    finding = kernels.compare(rows("cast")[0], planted(cast=broken), CPU, SIZES)
    assert finding.verdict == "fail"
    assert "RuntimeError: an illegal memory access" in finding.why


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
