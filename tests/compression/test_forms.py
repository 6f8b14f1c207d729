"""Payloads of blockwise quantization, top-k and casts, against definitions in numpy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor, TopK
from deepspeed_compress.compression.compressors.sparsifiers import Selection
from tests.compression.sparse_oracles import Floats, kept_of
from tests.support.codecs import encode, transmit
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


@pytest.mark.parametrize("density", DENSITIES)
def test_topk_counts_with_exact_arithmetic(density: str) -> None:
    """In floating point, 0.07 * 100 is above 7, but 7 elements are kept."""
    for numel in range(1300):
        whole, rest = divmod(numel, 640)
        expected = whole * kept_of(density, 640) + kept_of(density, rest)
        assert TopK(float(density), 640).kept(numel) == expected


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


@pytest.mark.parametrize("exponent", range(6, 17))
def test_the_bits_of_an_index_depend_on_the_block_size(exponent: int) -> None:
    """Eight indices of b bits take b bytes. The last column of a block is decoded correctly at every width."""
    block = 1 << exponent
    codec = TopK(8 / block, block)
    assert Selection(block, block, codec.density).index_bits == exponent
    assert codec.payload_bytes(block) == -(-exponent // 4) * 4 + 8 * 4
    x = torch.zeros(block)
    x[torch.linspace(0, block - 1, 8).long()] = torch.arange(1.0, 9.0)
    assert torch.equal(transmit(codec, x), x)


@pytest.mark.parametrize("density", [1e-10, 1e-30, 5e-324])
def test_the_smallest_densities_keep_one_element_per_block(density: float) -> None:
    assert [TopK(density, 640).kept(numel) for numel in (0, 1, 640, 641)] == [0, 1, 1, 2]
