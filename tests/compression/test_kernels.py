import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_compress.compression import kernels
from deepspeed_compress.compression.compressors import random_key
from deepspeed_compress.compression.kernels import for_device, reference
from deepspeed_compress.errors import CompressWarning
from tests.support.properties import properties

CPU = torch.device("cpu")
KEYS = st.integers(0, 2**64 - 1)


def lowbias32(value: int) -> int:
    """Compute the 32-bit mixer with Python's unbounded integers."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        value = ((value ^ (value >> shift)) * factor) % 2**32
    return value


@properties
@given(KEYS)
def test_uniform_numbers_are_the_mixed_counter(key: int) -> None:
    low, high = key % 2**32, key >> 32
    expected = [(lowbias32(((index + low) % 2**32) ^ high) >> 8) / 2**24 for index in range(20)]
    assert reference.uniform(20, key, CPU).tolist() == expected


@pytest.mark.parametrize("parts", [(0,), (0, 1), (7, 3, 2, 1, 0, 1)])
def test_uniform_numbers_are_uniform(parts: tuple[int, ...]) -> None:
    """Mean, 64-bin chi-square and serial correlation are within 5 standard deviations."""
    count, bins = 1 << 16, 64
    numbers = reference.uniform(count, random_key(*parts), CPU).double()
    assert 0 <= float(numbers.min()) <= float(numbers.max()) < 1
    centered = numbers - 0.5
    assert abs(float(centered.mean())) < 5 / math.sqrt(12 * count)
    assert abs(float((centered[1:] * centered[:-1]).mean()) * 12) < 5 / math.sqrt(count)
    expected = count / bins
    chi_square = float(((torch.histc(numbers, bins, 0, 1) - expected) ** 2 / expected).sum())
    assert abs(chi_square - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))


def test_keys_depend_on_every_part_and_on_their_order() -> None:
    keys = {random_key(*parts) for parts in [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (2**64 - 1,)]}
    assert len(keys) == 8
    assert all(0 <= key < 2**64 for key in keys)


@pytest.mark.parametrize(("noise", "expected"), [(0.0, [1, -2, 2, -3]), (0.5, [2, -1, 3, -2])])
def test_stochastic_codes_are_the_floor_of_quotient_plus_noise(noise: float, expected: list[int]) -> None:
    rows = torch.tensor([[7.0, 1.5, -1.5, 2.5, -2.5]])
    codes = reference.quantize_rows(rows, torch.ones(1), 7, torch.full_like(rows, noise))
    assert codes[0, 1:].tolist() == expected


def test_nearest_codes_round_ties_to_even() -> None:
    codes = reference.quantize_rows(torch.tensor([[7.0, 0.5, 1.5, -0.5, -2.5, 2.75, 9.0]]), torch.ones(1), 7, None)
    assert codes.tolist() == [[7, 0, 2, 0, -2, 3, 7]]


@pytest.mark.parametrize(("units", "scale", "codes"), [(190, 1, [127, -127, 1]), (50, 0, [0, 0, 0])])
def test_codes_stay_in_range_if_the_scale_is_denormal(units: int, scale: int, codes: list[int]) -> None:
    """In units of the smallest denormal, 190 / 127 rounds to 1 and 50 / 127 to 0."""
    rows = torch.tensor([[units, -units, 1]]) * 2.0**-149
    scales = torch.tensor([scale * 2.0**-149])
    assert torch.equal(rows.amax(dim=1) / 127, scales)
    assert reference.quantize_rows(rows, scales, 127, None).tolist() == [codes]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_scale_affects_only_its_row(bad: float) -> None:
    rows, scales = torch.ones(3, 4), torch.tensor([1.0, bad, 1.0])
    out = torch.zeros(3, 4)
    reference.dequantize_rows_add(scales, reference.quantize_rows(rows, scales, 127, None), out, 1.0)
    assert out.isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize(("noise", "expected"), [(None, [0, 2, 2, 15]), (0.0, [0, 1, 2, 15]), (0.9, [0, 2, 3, 15])])
def test_codes_between_two_extremes_start_at_the_lower_one(noise: float | None, expected: list[int]) -> None:
    """The range of the second row exceeds fp32; the last row has equal elements."""
    row = torch.tensor([-3.0, -1.25, -0.75, 12.0])
    rows = torch.stack((row, (row - 4.5) / 7.5 * 2.0**127 * 1.5, torch.full((4,), 7.0)))
    fill = None if noise is None else torch.full_like(rows, noise)
    codes = reference.quantize_rows_between(rows, rows.amin(dim=1), rows.amax(dim=1), 15, fill)
    assert codes.tolist() == [expected, expected, [0] * 4]


def test_dequantizing_adds_the_scaled_product() -> None:
    out = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    codes = torch.tensor([[1, -2], [3, 0]], dtype=torch.int8)
    reference.dequantize_rows_add(torch.tensor([2.0, 0.5]), codes, out, 4.0)
    assert out.tolist() == [[9.0, -14.0], [9.0, 4.0]]


@pytest.mark.parametrize("width", range(1, 9))
@properties
@given(codes=st.lists(st.integers(0, 255), max_size=33))
def test_codes_are_packed_as_a_bit_string_and_padded_with_zeros(width: int, codes: list[int]) -> None:
    packed = torch.full((-(-len(codes) * width // 8) + 3,), 0xFF, dtype=torch.uint8)
    reference.pack_codes(torch.tensor(codes, dtype=torch.uint8), width, packed)
    low = [code % 2**width for code in codes]
    assert int.from_bytes(bytes(packed.tolist()), "little") == sum(c << (width * i) for i, c in enumerate(low))
    assert reference.unpack_codes(packed, width, len(codes)).tolist() == low


@pytest.mark.parametrize("k", [1, 2])
def test_top_k_prefers_nan_to_infinity(k: int) -> None:
    row = torch.tensor([[1.0, math.inf, 2.0, math.nan]])
    assert reference.top_k_rows(row, k).tolist() == [[3], [1, 3]][k - 1 : k]


def test_a_device_without_an_implementation_is_named() -> None:
    with pytest.raises(KeyError, match="meta"):
        for_device(torch.device("meta"))


def test_an_older_triton_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", "3.5.1")
    monkeypatch.delitem(sys.modules, "deepspeed_compress.compression.kernels.gpu", raising=False)
    with pytest.warns(CompressWarning, match=r"plain torch.*Triton 3\.5\.1 is installed; Triton 3\.6 or newer"):
        assert kernels._implementation.__wrapped__("cuda") is reference


@properties
@given(KEYS, st.integers(0, 50))
def test_a_uniform_number_depends_only_on_key_and_index(key: int, count: int) -> None:
    assert torch.equal(reference.uniform(count, key, CPU), reference.uniform(60, key, CPU)[:count])
