"""Each quantizer against its published form in float64, and the bounds that the papers prove."""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_compress.compression.compressors.base import Compressor
from deepspeed_compress.compression.compressors.blocks import FormQuantizer, RowQuantizer
from deepspeed_compress.compression.compressors.quantizers import FP8, QSGD, Blockwise, Linear, Percentile, Sign
from deepspeed_compress.compression.kernels import reference
from tests.compression import oracles
from tests.compression.oracles import Doubles, Grid
from tests.support.codecs import encode, transmit
from tests.support.properties import properties

SAMPLED = pytest.mark.sampled(6)

BF16, FP16 = torch.bfloat16, torch.float16
BLOCK = 64
BITS = (8, 4, 2)

BlockQuantizer = FormQuantizer | RowQuantizer
GRIDS: list[tuple[BlockQuantizer, Callable[[Doubles], Grid]]] = [
    *((Blockwise(bits, BLOCK, True), lambda x, b=bits: oracles.absmax(x, b)) for bits in BITS),
    *((Blockwise(bits, BLOCK), lambda x, b=bits: oracles.absmax(x, b)) for bits in (8, 4)),
    (Blockwise(3, BLOCK, True), lambda x: oracles.absmax(x, 3)),
    *(
        (Linear(bits, BLOCK, chance), lambda x, b=bits: oracles.linear(x, b))
        for bits in BITS
        for chance in (True, False)
    ),
    *(
        (Percentile(bits, BLOCK, percent, chance), lambda x, b=bits, p=percent: oracles.percentile(x, b, p))
        for bits, percent, chance in ((8, 99.0, False), (4, 90.0, False), (4, 50.0, True), (2, 100.0, True))
    ),
    *((QSGD(levels, BLOCK), lambda x, s=levels: oracles.qsgd(x, s)) for levels in (1, 5, 7, 127)),
]
"""Quantizers with levels of equal distance, each with its oracle for one block."""

QUANTIZERS: list[BlockQuantizer] = [
    *(codec for codec, _ in GRIDS),
    Blockwise(2, BLOCK),
    Blockwise(3, BLOCK),
    *(Blockwise(bits, BLOCK, scale_dtype=dtype) for bits in (*BITS, 3) for dtype in (BF16, FP16)),
    *(Linear(bits, BLOCK, scale_dtype=dtype) for bits in BITS for dtype in (BF16, FP16)),
    FP8("e4m3", BLOCK),
    FP8("e5m2", BLOCK),
    Sign(BLOCK),
    Sign(BLOCK, scale_dtype=BF16),
    Sign(BLOCK, levels=3),
    Sign(BLOCK, 3, BF16),
]
# Each quantizer has its own examples, so the number per quantizer is small.
examples = settings(properties, max_examples=15)
every_quantizer = pytest.mark.parametrize("codec", QUANTIZERS, ids=repr)
on_a_grid = pytest.mark.parametrize(("codec", "oracle"), GRIDS, ids=[repr(codec) for codec, _ in GRIDS])


def sample(seed: int, numel: int = 5 * BLOCK + 7, exponent: int = 0) -> Tensor:
    """Return normal numbers, with a different power of two as the factor of each block."""
    generator = np.random.default_rng(seed)
    spread = np.repeat(2.0 ** generator.integers(-6, 7, -(-numel // BLOCK)), BLOCK)[:numel]
    return torch.from_numpy((generator.normal(size=numel) * spread * 2.0**exponent).astype(np.float32))


def blocks(x: Tensor, size: int = BLOCK) -> list[Doubles]:
    return [part.double().numpy() for part in torch.split(x, size)]


def uniforms_of(key: int, numel: int) -> Doubles:
    uniforms: Tensor = reference.uniform(numel, key, torch.device("cpu"))
    return uniforms.double().numpy()


def norm2(x: Tensor) -> float:
    return float(x.double().square().sum())


seeds = st.integers(0, 2**32 - 1)
vectors = st.builds(sample, seeds, st.integers(1, 4 * BLOCK), st.integers(-40, 40))


@on_a_grid
@examples
@given(x=vectors, key=st.integers(0, 2**64 - 1))
def test_every_code_matches_the_published_form(
    codec: BlockQuantizer, oracle: Callable[[Doubles], Grid], x: Tensor, key: int
) -> None:
    """The uniform numbers are the same. fp32 may differ only within 0.1 % of a step from a rounding threshold."""
    drawn = uniforms_of(key, x.numel())
    for first, part, block in zip(range(0, x.numel(), BLOCK), blocks(x), blocks(transmit(codec, x, key)), strict=True):
        uniforms = drawn[first : first + BLOCK] if codec.stochastic else None
        grid = oracle(part)
        expected, undecided = grid.decode(uniforms), grid.undecided(uniforms)
        wrong = np.abs(block - expected) > 1e-5 * np.abs(part).max()
        assert not (wrong & ~undecided).any()
        assert (np.abs(block - expected)[undecided] <= 1.001 * grid.step).all()


@pytest.mark.parametrize(
    ("levels", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (8, 5), (63, 7), (64, 8), (127, 8)]
)
def test_the_bits_of_a_qsgd_code_depend_on_the_levels(levels: int, bits: int) -> None:
    """There are ceil(log2(2 s + 1)) bits, and both extremes survive."""
    codec = QSGD(levels, 32)
    assert codec.form.bits == bits
    assert codec.payload_bytes(320) == 10 * 4 + 40 * bits
    x = torch.zeros(64)
    x[3], x[40] = 5.0, -5.0
    assert torch.allclose(transmit(codec, x), x, rtol=1e-6, atol=0)


@properties
@given(x=vectors)
def test_sign_matches_the_scaled_sign(x: Tensor) -> None:
    for part, block in zip(blocks(x), blocks(transmit(Sign(BLOCK), x)), strict=True):
        assert np.allclose(block, oracles.scaled_sign(part), rtol=1e-6, atol=0)


def test_the_sign_of_zero_is_positive() -> None:
    assert transmit(Sign(32), torch.tensor([0.0, -0.0, -4.0, 8.0])).tolist() == [3.0, 3.0, -3.0, 3.0]


CONTRACTIONS: list[tuple[BlockQuantizer, float]] = [
    (Blockwise(8, BLOCK), 1 / BLOCK),
    (Blockwise(4, BLOCK), 1 / BLOCK),
    (Blockwise(4, BLOCK, scale_dtype=BF16), 0.9 / BLOCK),
    (Blockwise(2, BLOCK), 1 / (16 * BLOCK)),
    (Blockwise(2, BLOCK, scale_dtype=BF16), 0.9 / (16 * BLOCK)),
    (FP8("e4m3", BLOCK), 1 / BLOCK),
    (FP8("e5m2", BLOCK), 1 / BLOCK),
    (Sign(BLOCK), 1 / BLOCK),
    (Blockwise(3, BLOCK), 1 / (100 * BLOCK)),
    (Sign(BLOCK, levels=3), 1 / (16 * BLOCK)),
]


@pytest.mark.parametrize(("codec", "delta"), CONTRACTIONS, ids=repr)
@examples
@given(st.lists(st.floats(-1, 1, width=16), min_size=1, max_size=3 * BLOCK), st.integers(-30, 30))
def test_quantizers_are_contractions_as_error_feedback_requires(
    codec: BlockQuantizer, delta: float, values: list[float], exponent: int
) -> None:
    """||x - C(x)||^2 <= (1 - delta) ||x||^2 for any x.

    If 0 and the largest magnitude are levels, the error of an element is at most its magnitude, and 0 for the largest.
    The least-squares scale of sign patterns c removes <x, c>^2 / ||c||^2 >= ||x||_1^2 / (16 n) from ||x||^2; with eight
    levels, it is ||x||_1^2 / (100 n). If c is 0 below 3/4 of the mean, <x, c> >= ||x||_1 / 4.
    """
    x = torch.tensor(values) * 2.0**exponent
    for part, found in zip(torch.split(x, BLOCK), torch.split(transmit(codec, x), BLOCK), strict=True):
        assert norm2(part - found) <= (1 - delta) * norm2(part) + 1e-6 * norm2(part)


def distributions() -> dict[str, Tensor]:
    generator = np.random.default_rng(0)
    drawn = {"normal": generator.normal(size=2**16), "laplace": generator.laplace(size=2**16)}
    return {name: torch.from_numpy(values.astype(np.float32)) for name, values in drawn.items()}


@pytest.mark.parametrize(
    ("codec", "name", "documented", "slack"),
    [
        (Blockwise(2, 256), "normal", 0.12, 0.08),
        (Blockwise(2, 256), "laplace", 0.18, 0.05),
        (Blockwise(3, 256), "normal", 0.039, 0.04),
        (Blockwise(3, 256), "laplace", 0.060, 0.04),
        (Sign(256, levels=3), "normal", 0.19, 0.04),
        (Sign(256, levels=3), "laplace", 0.267, 0.04),
    ],
    ids=repr,
)
def test_the_error_of_fitted_levels_is_as_documented(
    codec: BlockQuantizer, name: str, documented: float, slack: float
) -> None:
    x = distributions()[name]
    assert abs(oracles.squared_error(x.double().numpy(), transmit(codec, x).double().numpy()) / documented - 1) < slack


@SAMPLED
@pytest.mark.parametrize("name", ["normal", "laplace"])
@pytest.mark.parametrize(
    ("codec", "magnitudes", "slack"),
    [
        (Blockwise(2, BLOCK), (1, 4), 1.03),
        (Blockwise(3, BLOCK), (1, 3, 6, 10), 1.32),
        (Sign(BLOCK, levels=3), (0, 1), 1.07),
    ],
    ids=repr,
)
def test_fitted_scales_are_close_to_the_optimum(
    codec: BlockQuantizer, magnitudes: tuple[int, ...], slack: float, name: str
) -> None:
    """The mean squared error is slightly above that of the best of 400 scales per block."""
    x = distributions()[name][: 40 * BLOCK]
    nearest = functools.partial(oracles.nearest_level, magnitudes)
    found, best = [], []
    for part, decoded in zip(blocks(x), blocks(transmit(codec, x)), strict=True):
        best.append(oracles.squared_error(part, nearest(part, oracles.best_scale(part, nearest))))
        found.append(oracles.squared_error(part, decoded))
        # Every element has its nearest level.
        scale = np.abs(decoded)[np.abs(decoded) > 0].min() / min(m for m in magnitudes if m)
        assert oracles.squared_error(part, nearest(part, float(scale))) > 0.999999 * found[-1]
    assert np.mean(found) <= slack * np.mean(best)


def test_three_levels_keep_zeros() -> None:
    assert transmit(Sign(32, levels=3), torch.tensor([0.0, -0.0, -4.0, 8.0, 0.5])).tolist() == [0, 0, -6, 6, 0]
    assert not transmit(Sign(32, levels=3), torch.zeros(70)).any()


@pytest.mark.parametrize("codec", [Sign(32, levels=3), Blockwise(3, 32)], ids=repr)
def test_a_fit_with_an_initial_scale_beyond_fp32_ends_in_range(codec: BlockQuantizer) -> None:
    x = torch.full((64,), 3e38)
    assert torch.allclose(transmit(codec, x), x, rtol=0.2, atol=0)


@pytest.mark.parametrize(
    ("codec", "numbers"),
    [(FP8("e4m3", BLOCK), oracles.fp8_numbers(4, False)), (FP8("e5m2", BLOCK), oracles.fp8_numbers(5, True))],
    ids=["e4m3", "e5m2"],
)
@properties
@given(x=vectors)
def test_fp8_rounds_to_the_nearest_number_of_its_format(codec: FP8, numbers: Doubles, x: Tensor) -> None:
    for part, block in zip(blocks(x), blocks(transmit(codec, x)), strict=True):
        expected, undecided = oracles.fp8(part, numbers)
        wrong = np.abs(block - expected) > 1e-6 * np.abs(expected)
        assert not (wrong & ~undecided).any()


@pytest.mark.parametrize(("name", "largest", "count"), [("e4m3", 448, 253), ("e5m2", 57344, 247)])
def test_numbers_of_an_fp8_format_are_exact(name: str, largest: int, count: int) -> None:
    numbers = oracles.fp8_numbers(4 if name == "e4m3" else 5, name == "e5m2")
    assert (numbers.max(), len(numbers)) == (largest, count)
    x = torch.from_numpy(numbers.astype(np.float32)) * 2.0**10
    assert torch.equal(transmit(FP8(name, 512), x), x)


def test_an_unknown_fp8_format_is_named() -> None:
    with pytest.raises(KeyError, match="e3m4"):
        encode(FP8("e3m4"), torch.ones(3))


@SAMPLED
@pytest.mark.parametrize("codec", [codec for codec in QUANTIZERS if not codec.stochastic], ids=repr)
@examples
@given(x=vectors)
def test_blocks_are_quantized_independently(codec: BlockQuantizer, x: Tensor) -> None:
    alone = torch.cat([transmit(codec, part) for part in torch.split(x, BLOCK)])
    assert torch.equal(transmit(codec, x), alone)


@SAMPLED
@every_quantizer
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, BLOCK + 5, 2 * BLOCK - 1, 3 * BLOCK + 1])
def test_a_non_finite_element_affects_only_its_block(codec: BlockQuantizer, bad: float, place: int) -> None:
    x = sample(1, 3 * BLOCK + 7)
    x[place] = bad
    finite = [bool(part.isfinite().all()) for part in torch.split(transmit(codec, x), BLOCK)]
    assert finite == [block != place // BLOCK for block in range(4)]


SIZES: list[tuple[Compressor, list[int]]] = [
    (Blockwise(8, 64), [0, 8, 68, 76, 144]),
    (Blockwise(4, 64), [0, 8, 36, 44, 80]),
    (Blockwise(8, 64, scale_dtype=BF16), [0, 8, 68, 72, 140]),
    (Blockwise(2, 64), [0, 8, 20, 28, 48]),
    (Blockwise(2, 64, scale_dtype=FP16), [0, 8, 20, 24, 44]),
    (Linear(8, 64), [0, 12, 72, 84, 156]),
    (Linear(4, 64, scale_dtype=BF16), [0, 8, 36, 44, 80]),
    (Percentile(4, 64), [0, 8, 36, 44, 80]),
    (QSGD(7, 64), [0, 8, 36, 44, 80]),
    (QSGD(2, 64), [0, 8, 28, 36, 64]),
    (FP8("e4m3", 64), [0, 8, 68, 76, 144]),
    (Sign(64), [0, 8, 12, 20, 32]),
    (Sign(64, levels=3), [0, 8, 20, 24, 40]),
    (Sign(32, 3, BF16), [0, 8, 20, 24, 44]),
    (Blockwise(3, 64), [0, 8, 28, 36, 64]),
]


@pytest.mark.parametrize(("codec", "expected"), SIZES, ids=repr)
def test_payload_sizes(codec: Compressor, expected: list[int]) -> None:
    """The sizes are for 0 elements, 1 element, 1 block, and 1 element more than 1 and 2 blocks."""
    assert [codec.payload_bytes(numel) for numel in (0, 1, 64, 65, 129)] == expected


def test_payload_layouts() -> None:
    """Scales come first, followed by the codes, starting with the lowest bits."""
    two_bits = encode(Blockwise(2, 32), torch.tensor([1.0, -1.0, 4.0, -4.0, 4.0]))
    assert two_bits[:4].view(torch.float32).item() == 1.0
    assert two_bits[4:].tolist() == [0b01_11_00_10, 0b11, 0, 0]
    signs = encode(Sign(32), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0, 1.0]))
    assert (signs[:4].view(torch.float32).item(), signs[4:].tolist()) == (1.0, [0b00001101, 1, 0, 0])
    trits = encode(Sign(32, levels=3), torch.tensor([8.0, -8.0, 8.0, 0.0, 0.0, 8.0]))
    assert (trits[:4].view(torch.float32).item(), trits[4:].tolist()) == (8.0, [2 + 0 + 18 + 27 + 81, 2, 0, 0])
    eight = encode(Blockwise(3, 32), torch.tensor([1.0, -3.0, 6.0, -10.0, 1.0, 1.0, 1.0, -1.0]))
    assert (eight[:4].view(torch.float32).item(), eight[4:].tolist()) == (
        1.0,
        [0b10_001_100, 0b0_100_011_1, 0b000_100_10, 0],
    )
    spread = encode(Linear(4, 32, scale_dtype=BF16), torch.tensor([-5.0, 10.0, 0.0]))
    assert (spread[:4].view(BF16).tolist(), spread[4:].tolist()) == ([-5.0, 10.0], [0xF0, 0x05, 0, 0])
    scaled = encode(FP8("e5m2", 32), torch.tensor([57344.0, -1.0]))
    assert (scaled[:4].view(torch.float32).item(), scaled[4:].tolist()) == (1.0, [0x7B, 0xBC, 0, 0])


def scales_of(codec: Blockwise, x: Tensor) -> Tensor:
    count = -(-x.numel() // codec.block_size)
    return encode(codec, x)[: count * codec.scale_dtype.itemsize].view(codec.scale_dtype).double()


@pytest.mark.parametrize(("dtype", "precision"), [(BF16, 2**-8), (FP16, 2**-11)])
@pytest.mark.parametrize("bits", [8, 4])
@examples
@given(seed=seeds)
def test_codes_are_computed_with_the_rounded_scale(bits: int, dtype: torch.dtype, precision: float, seed: int) -> None:
    """The error is at most half of the rounded scale, except for elements that the rounding clips."""
    x = sample(seed, exponent=3)
    codec = Blockwise(bits, BLOCK, scale_dtype=dtype)
    for part, block, scale in zip(blocks(x), blocks(transmit(codec, x)), scales_of(codec, x), strict=True):
        largest = np.abs(part).max()
        exact = largest / codec.form.levels
        assert abs(float(scale) - exact) <= precision * exact
        clipped = largest - codec.form.levels * float(scale)
        assert np.abs(block - part).max() <= max(float(scale) / 2, clipped) * (1 + 2**-15)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("make", [Blockwise, Linear])
@pytest.mark.parametrize("stochastic", [False, True])
def test_finite_blocks_beyond_fp16_are_clipped(
    make: type[Blockwise] | type[Linear], bits: int, stochastic: bool
) -> None:
    codec = make(bits, 32, stochastic, FP16)
    x = torch.full((32,), 1e30)
    x[::2] = -1e30
    decoded = transmit(codec, x)
    assert torch.equal(decoded.sign(), x.sign())
    assert torch.isin(decoded.abs() / 65504, torch.tensor([1.0, 4.0, 7.0, 127.0])).all()


@properties
@given(x=vectors, bits=st.sampled_from(BITS))
def test_linear_keeps_the_extremes_of_every_block(x: Tensor, bits: int) -> None:
    for part, found in zip(torch.split(x, BLOCK), torch.split(transmit(Linear(bits, BLOCK), x), BLOCK), strict=True):
        for place in (int(part.argmin()), int(part.argmax())):
            assert float(found[place]) == float(part[place])
        half_step = (part.max() - part.min()) / (2**bits - 1) / 2
        assert float((found - part).abs().max()) <= 1.0001 * float(half_step)


@properties
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), seeds, st.sampled_from(BITS), st.booleans())
def test_linear_keeps_blocks_of_equal_elements_exactly(value: float, key: int, bits: int, stochastic: bool) -> None:
    x = torch.full((BLOCK + 3,), value)
    assert torch.equal(transmit(Linear(bits, BLOCK, stochastic), x, key), x)


def test_linear_spans_the_whole_range_of_fp32() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([-largest, largest, largest / 3, -largest / 3])
    assert torch.allclose(transmit(Linear(2, 32), x), x, rtol=1e-6)


def test_percentile_clips_elements_above_its_rank() -> None:
    """90 % of 20 elements do not exceed 18. The two larger ones become 18, with their signs."""
    x = torch.arange(1.0, 21.0)
    x[18] = -1000.0
    decoded = transmit(Percentile(8, 32, 90.0), x)
    assert decoded[17:].tolist() == [18.0, -18.0, 18.0]
    assert float((decoded[:18] - x[:18]).abs().max()) <= 18 / 127 / 2 * 1.0001


@pytest.mark.parametrize("percentile", [50.0, 99.0])
def test_percentile_sends_the_few_nonzero_elements_of_a_block(percentile: float) -> None:
    x = torch.zeros(256)
    x[100] = -3.0
    assert torch.equal(transmit(Percentile(8, 256, percentile), x), x)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16])
@examples
@given(seed=seeds)
def test_two_bits_round_to_the_nearest_level_of_the_rounded_scale(dtype: torch.dtype, seed: int) -> None:
    x, codec = sample(seed), Blockwise(2, BLOCK, scale_dtype=dtype)
    for part, block, scale in zip(blocks(x), blocks(transmit(codec, x)), scales_of(codec, x), strict=True):
        tied = np.abs(np.abs(part) - 2.5 * float(scale)) < 1e-6 * float(scale)
        assert (np.isclose(block, oracles.nearest_level((1, 4), part, float(scale)), rtol=1e-6, atol=0) | tied).all()


UNBIASED = [(codec, oracle) for codec, oracle in GRIDS if codec.stochastic and getattr(codec, "percentile", 100) == 100]


@SAMPLED
@pytest.mark.parametrize(("codec", "oracle"), UNBIASED, ids=[repr(codec) for codec, _ in UNBIASED])
def test_the_mean_over_keys_equals_the_input(codec: BlockQuantizer, oracle: Callable[[Doubles], Grid]) -> None:
    """It is within 5 standard errors for 1000 keys. 0.01 % of a step is allowed for fp32."""
    count, x = 1000, sample(3, BLOCK)
    mean = torch.stack([transmit(codec, x, key) for key in range(count)]).double().mean(dim=0).numpy()
    grid = oracle(x.double().numpy())
    assert (np.abs(mean - x.double().numpy()) <= 5 * grid.standard_error(count) + 1e-4 * grid.step).all()


@pytest.mark.parametrize("key", range(10))
def test_two_stochastic_bits_match_terngrad(key: int) -> None:
    x = sample(key, BLOCK)
    expected = oracles.terngrad(x.double().numpy(), uniforms_of(key, BLOCK))
    assert np.allclose(transmit(Blockwise(2, BLOCK, stochastic=True), x, key).numpy(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("levels", [1, 4, 7, 100])
def test_qsgd_matches_equation_3_1(levels: int) -> None:
    """Positive elements are rounded away from zero by large uniform numbers, negative ones by small ones."""
    x = sample(levels, BLOCK)
    uniforms = uniforms_of(9, BLOCK)
    # Uniform numbers have 24 bits, so 1 - u is never 0, and the reflection keeps all decisions.
    coins = np.where(x.numpy() >= 0, 1 - uniforms - 2.0**-25, uniforms)
    expected = oracles.qsgd_values(x.double().numpy(), levels, coins)
    assert np.allclose(transmit(QSGD(levels, BLOCK), x, 9).numpy(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("levels", [1, 2, 7, 127])
def test_the_variance_of_qsgd_is_within_lemma_3_1(levels: int) -> None:
    """E||Q(x) - x||^2 <= min(n / s^2, sqrt(n) / s) ||x||^2 for the mean over 500 keys, within 5 standard errors."""
    x = sample(1, BLOCK)
    errors = torch.tensor([norm2(transmit(QSGD(levels, BLOCK), x, key) - x) for key in range(500)]) / norm2(x)
    bound = min(BLOCK / levels**2, math.sqrt(BLOCK) / levels)
    assert float(errors.mean()) <= bound + 5 * float(errors.std()) / math.sqrt(len(errors))


@properties
@given(x=vectors)
def test_the_error_of_sign_depends_on_the_density_of_the_block(x: Tensor) -> None:
    """||x - C(x)||^2 = (1 - d) ||x||^2 with d = ||x||_1^2 / (n ||x||^2) (arXiv:1901.09847)."""
    for part, found in zip(blocks(x), blocks(transmit(Sign(BLOCK), x)), strict=True):
        density = np.abs(part).sum() ** 2 / (len(part) * (part**2).sum())
        assert math.isclose(oracles.squared_error(part, found), 1 - density, rel_tol=0, abs_tol=1e-5)
