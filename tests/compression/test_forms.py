"""Payloads and errors of blockwise quantization, top-k and casts, against definitions in numpy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor, TopK
from tests.compression.sparse_oracles import Floats, kept_of
from tests.support.codecs import decode, encode, transmit
from tests.support.properties import properties

DENSITIES = ("0.001", "0.01", "0.07", "0.1", "0.3", "0.55", "1")


@st.composite
def vectors(draw: st.DrawFn, largest: int = 300) -> Floats:
    """Generate normal numbers of a random magnitude."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = generator.normal(size=draw(st.integers(1, largest))) * 2.0 ** draw(st.integers(-40, 40))
    return values.astype(np.float32)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def payload(codec: Compressor, x: Floats) -> bytes:
    return encode(codec, torch.from_numpy(x)).numpy().tobytes()


def blocks(x: Floats, size: int) -> list[Floats]:
    return [x[start : start + size] for start in range(0, len(x), size)]


def quantized(x: Floats, levels: int) -> tuple[np.float32, NDArray[np.int8]]:
    """Return the scale and codes of one block: q = rint(x / s), s = max |x| / levels, in fp32."""
    scale = np.float32(np.abs(x).max() / np.float32(levels))
    return scale, np.rint(x / scale).astype(np.int8)


def packed_nibbles(codes: NDArray[np.int8]) -> bytes:
    """Pack codes in two's complement of 4 bits, with the first code in the low half of a byte."""
    halves = np.append(codes, np.int8(0))[: len(codes) + len(codes) % 2].view(np.uint8) & 0xF
    return bytes(halves[0::2] | halves[1::2] << 4)


@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize("bits", [8, 4])
@properties
@given(x=vectors())
def test_blockwise_payload_is_scales_then_codes(bits: int, block: int, x: Floats) -> None:
    parts = [quantized(part, 2 ** (bits - 1) - 1) for part in blocks(x, block)]
    codes = np.concatenate([codes for _, codes in parts])
    packed = codes.tobytes() if bits == 8 else packed_nibbles(codes)
    expected = np.array([scale for scale, _ in parts]).tobytes() + padded(packed)
    assert payload(Blockwise(bits, block), x) == expected


@pytest.mark.parametrize("block", [32, 256])
@pytest.mark.parametrize("bits", [8, 4])
@properties
@given(x=vectors())
def test_the_error_of_blockwise_is_at_most_half_a_level(bits: int, block: int, x: Floats) -> None:
    """|decoded - x| <= s / 2 with s = max |x| / levels of the block, to fp32 rounding."""
    decoded = transmit(Blockwise(bits, block), torch.from_numpy(x)).numpy().astype(np.float64)
    for part, found in zip(blocks(x.astype(np.float64), block), blocks(decoded, block), strict=True):
        largest = np.abs(part).max()
        half_level = largest / (2 ** (bits - 1) - 1) / 2
        assert np.abs(found - part).max() <= half_level * (1 + 2**-20) + largest * 2**-23


@pytest.mark.parametrize("bits", [8, 4])
@properties
@given(st.integers(-20, 20), st.integers(0, 2**32 - 1))
def test_blockwise_is_exact_on_its_own_levels(bits: int, exponent: int, seed: int) -> None:
    levels = 2 ** (bits - 1) - 1
    codes = np.random.default_rng(seed).integers(-levels, levels, 70, endpoint=True)
    codes[::32] = levels
    x = torch.from_numpy(codes.astype(np.float32)) * 2.0**exponent
    for stochastic in (False, True):
        assert torch.equal(transmit(Blockwise(bits, 32, stochastic), x, seed), x)


@pytest.mark.parametrize("bits", [8, 4])
def test_payload_sizes_of_blockwise(bits: int) -> None:
    sizes = [Blockwise(bits, 64).payload_bytes(numel) for numel in (0, 1, 63, 64, 65)]
    assert sizes == {8: [0, 8, 68, 68, 76], 4: [0, 8, 36, 36, 44]}[bits]


STOCHASTIC_BLOCK = 64


def stochastic_case(bits: int) -> tuple[torch.Tensor, float]:
    """Return a block with many different fractions of a level, and the level."""
    x = torch.linspace(-1, 1, STOCHASTIC_BLOCK)
    return x, 1 / (2 ** (bits - 1) - 1)


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_is_unbiased_within_a_message(bits: int) -> None:
    """The mean over n blocks with the same content deviates by less than 5 sigma.

    Rounding up with probability f has variance s^2 f (1 - f), so sigma = s sqrt(f (1 - f) / n); 0.01 % of a level is
    allowed for fp32.
    """
    x, level = stochastic_case(bits)
    count = 4096
    decoded = transmit(Blockwise(bits, STOCHASTIC_BLOCK, stochastic=True), x.repeat(count), 5)
    mean = decoded.view(count, -1).double().mean(dim=0)
    fraction = x.double() / level % 1
    sigma = level * (fraction * (1 - fraction) / count).sqrt()
    assert ((mean - x).abs() <= 5 * sigma + 1e-4 * level).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_is_unbiased_over_keys(bits: int) -> None:
    """The same bound holds for the mean over n keys, which correspond to steps."""
    x, level = stochastic_case(bits)
    count = 1000
    codec = Blockwise(bits, STOCHASTIC_BLOCK, stochastic=True)
    mean = torch.stack([transmit(codec, x, key) for key in range(count)]).double().mean(dim=0)
    fraction = x.double() / level % 1
    sigma = level * (fraction * (1 - fraction) / count).sqrt()
    assert ((mean - x).abs() <= 5 * sigma + 1e-4 * level).all()


@pytest.mark.parametrize("bits", [8, 4])
@properties
@given(vectors(), st.integers(0, 2**64 - 1))
def test_the_error_of_stochastic_rounding_is_at_most_one_level(bits: int, x: Floats, key: int) -> None:
    decoded = transmit(Blockwise(bits, 32, stochastic=True), torch.from_numpy(x), key).numpy()
    for part, found in zip(blocks(x, 32), blocks(decoded, 32), strict=True):
        largest = np.abs(part).max().astype(np.float64)
        level = largest / (2 ** (bits - 1) - 1)
        assert np.abs(found.astype(np.float64) - part).max() <= level * (1 + 2**-20) + largest * 2**-22


def selected(x: Floats, density: str, block: int) -> list[NDArray[np.int64]]:
    """Return the ascending columns of the largest magnitudes of each block."""
    return [np.sort(np.argsort(-np.abs(part))[: kept_of(density, len(part))]) for part in blocks(x, block)]


@pytest.mark.parametrize("density", DENSITIES)
@properties
@given(x=vectors())
def test_topk_keeps_the_largest_elements_of_every_block_exactly(density: str, x: Floats) -> None:
    expected = np.zeros_like(x)
    for block, columns in enumerate(selected(x, density, 64)):
        expected[64 * block + columns] = x[64 * block + columns]
    decoded = transmit(TopK(float(density), 64), torch.from_numpy(x)).numpy()
    assert decoded.tobytes() == expected.tobytes()


@pytest.mark.parametrize("density", DENSITIES)
@properties
@given(x=vectors())
def test_topk_payload_is_packed_columns_then_values(density: str, x: Floats) -> None:
    columns = selected(x, density, 64)
    flat = np.concatenate(columns)
    bits = sum(int(column) << (6 * index) for index, column in enumerate(flat))
    values = np.concatenate([x[64 * block + part] for block, part in enumerate(columns)])
    expected = padded(bits.to_bytes(-(-6 * len(flat) // 8), "little")) + values.tobytes()
    assert payload(TopK(float(density), 64), x) == expected


@pytest.mark.parametrize("exponent", range(6, 17))
def test_the_bits_of_an_index_depend_on_the_block_size(exponent: int) -> None:
    """Eight indices of b bits take b bytes. The last column of a block is decoded correctly at every width."""
    block = 1 << exponent
    codec = TopK(8 / block, block)
    assert codec.index_bits == exponent
    assert codec.payload_bytes(block) == -(-exponent // 4) * 4 + 8 * 4
    x = torch.zeros(block)
    x[torch.linspace(0, block - 1, 8).long()] = torch.arange(1.0, 9.0)
    assert torch.equal(transmit(codec, x), x)


@pytest.mark.parametrize("density", DENSITIES)
def test_topk_counts_with_exact_arithmetic(density: str) -> None:
    """In floating point, 0.07 * 100 is above 7, but 7 elements are kept."""
    for numel in range(1300):
        whole, rest = divmod(numel, 640)
        expected = whole * kept_of(density, 640) + kept_of(density, rest)
        assert TopK(float(density), 640).kept(numel) == expected


@pytest.mark.parametrize("density", [1e-10, 1e-30, 5e-324])
def test_the_smallest_densities_keep_one_element_per_block(density: float) -> None:
    assert [TopK(density, 640).kept(numel) for numel in (0, 1, 640, 641)] == [0, 1, 1, 2]


@pytest.mark.parametrize("inner", [Cast(torch.bfloat16), Blockwise(4, 32), Blockwise(8, 32, True)], ids=repr)
@properties
@given(x=vectors())
def test_topk_compresses_the_kept_values_as_one_vector(inner: Compressor, x: Floats) -> None:
    columns = selected(x, "0.3", 64)
    places = np.concatenate([64 * block + part for block, part in enumerate(columns)])
    kept = torch.from_numpy(x[places])
    expected = torch.zeros(len(x))
    expected[torch.from_numpy(places)] = transmit(inner, kept, 9)
    sent = encode(TopK(0.3, 64, inner), torch.from_numpy(x), 9)
    assert torch.equal(sent[-inner.payload_bytes(len(kept)) :], encode(inner, kept, 9))
    assert torch.equal(decode(TopK(0.3, 64, inner), sent, len(x)), expected)


def test_topk_keeps_the_same_number_of_elements_with_ties() -> None:
    decoded = transmit(TopK(0.25, 64), torch.ones(100))
    assert [int(part.sum()) for part in decoded.split(64)] == [16, 9]


def bf16(x: Floats) -> bytes:
    """Return the upper half of the fp32 bits, rounded to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return bytes(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes())


def fp16(x: Floats) -> bytes:
    return x.astype("<f2").tobytes()


BF16_LARGEST, FP16_LARGEST = np.float32((2 - 2**-7) * 2.0**127), np.float32(65504)


@pytest.mark.parametrize(
    ("dtype", "oracle", "largest"),
    [(torch.bfloat16, bf16, BF16_LARGEST), (torch.float16, fp16, FP16_LARGEST)],
    ids=["bf16", "fp16"],
)
@properties
@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40))
def test_a_cast_rounds_to_nearest_even_and_saturates(
    dtype: torch.dtype, oracle: Callable[[Floats], bytes], largest: np.float32, values: list[float]
) -> None:
    """Finite numbers beyond the range become the largest number. Infinities stay."""
    x = np.array(values, dtype=np.float32)
    in_range = np.where(np.isinf(x), x, np.clip(x, -largest, largest))
    assert payload(Cast(dtype), x) == padded(oracle(in_range))


@properties
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_fp32_is_sent_bit_for_bit(bits: list[int]) -> None:
    x = np.array(bits, dtype=np.uint32).view(np.float32)
    assert payload(Cast(torch.float32), x) == x.tobytes()
