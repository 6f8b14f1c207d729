"""Sparsifiers against their definitions: the kept elements, the payloads, and the bounds of the papers."""

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor
from deepspeed_compress.compression.compressors.base import message_key
from deepspeed_compress.compression.compressors.sparsifiers import BlockTopK, RandomK, TopK
from deepspeed_compress.compression.kernels import reference
from tests.compression.sparse_oracles import Floats, group_top_k, kept_of, only, packed_bits, top_k
from tests.support.codecs import encode, transmit
from tests.support.properties import properties

BLOCK, GROUP = 64, 8
DENSITIES = st.sampled_from(["0.001", "0.01", "0.07", "0.1", "0.3", "0.55", "1"])
Scope = Literal["block", "tensor", "threshold"]
WHOLE: tuple[Scope, ...] = ("tensor", "threshold")
LARGEST = float(np.finfo(np.float32).max)


@st.composite
def vectors(draw: st.DrawFn, largest: int = 700) -> Floats:
    """Generate normal numbers of a random magnitude from denormal to huge, or small integers with many ties."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numel = draw(st.integers(1, largest))
    if draw(st.booleans()):
        return generator.integers(-3, 3, numel, endpoint=True).astype(np.float32)
    values = generator.normal(size=numel).clip(-3.9, 3.9) * 2.0 ** draw(st.integers(-140, 126))
    return values.astype(np.float32)


def decoded(codec: Compressor, x: Floats, key: int = 1) -> Floats:
    found: Floats = transmit(codec, torch.from_numpy(x), key).numpy()
    return found


def support(codec: Compressor, numel: int, key: int) -> list[int]:
    """Return the positions that are sent for `numel` ones."""
    return transmit(codec, torch.ones(numel), key).nonzero().view(-1).tolist()


@properties
@given(vectors(), DENSITIES)
def test_topk_of_blocks_keeps_the_largest_elements_and_the_first_among_ties(x: Floats, density: str) -> None:
    expected = only(x, top_k(x, density, BLOCK))
    assert np.array_equal(decoded(TopK(float(density), BLOCK), x), expected)


@pytest.mark.parametrize("scope", WHOLE)
@properties
@given(x=vectors(), density=DENSITIES)
def test_topk_of_a_message_keeps_the_largest_elements_and_the_first_among_ties(
    scope: Scope, x: Floats, density: str
) -> None:
    expected = only(x, top_k(x, density, len(x)))
    assert np.array_equal(decoded(TopK(float(density), scope=scope), x), expected)


@pytest.mark.parametrize("scope", WHOLE)
@properties
@given(x=vectors(), density=DENSITIES)
def test_the_bits_of_an_index_depend_on_the_length_of_the_message(scope: Scope, x: Floats, density: str) -> None:
    positions = top_k(x, density, len(x))
    sent = encode(TopK(float(density), scope=scope), torch.from_numpy(x)).numpy().tobytes()
    assert sent == packed_bits(positions, (len(x) - 1).bit_length()) + x[positions].tobytes()


@properties
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_top_k_rows_matches_a_stable_sort_by_magnitude(width: int, k: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(-4, 4, (3, width), endpoint=True).astype(np.float32)
    expected = np.sort(np.argsort(-np.abs(rows), axis=1, kind="stable")[:, : min(k, width)], axis=1)
    assert reference.top_k_rows(torch.from_numpy(rows), min(k, width)).tolist() == expected.tolist()


@properties
@given(st.integers(0, 32), st.data())
def test_bits_of_any_width_are_packed_as_a_little_endian_string(width: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=20))
    expected = packed_bits(np.array(values, dtype=np.int64), width)
    packed = torch.full((len(expected),), 0xFF, dtype=torch.uint8)
    reference.pack_bits(torch.tensor(values, dtype=torch.int64), width, packed)
    assert bytes(packed.tolist()) == expected
    assert reference.unpack_bits(packed, width, len(values)).tolist() == values


@pytest.mark.parametrize("scope", ["block", *WHOLE])
def test_values_below_the_minimum_magnitude_are_sent_as_zeros(scope: Scope) -> None:
    """The payload size does not change. NaN and values of exactly that magnitude are sent."""
    x = torch.zeros(200)
    x[[3, 50, 120, 199]] = torch.tensor([0.5, -0.49, -2.0, 0.1])
    codec, plain = TopK(0.1, BLOCK, scope=scope, min_magnitude=0.5), TopK(0.1, BLOCK, scope=scope)
    expected = torch.zeros(200)
    expected[[3, 120]] = torch.tensor([0.5, -2.0])
    assert torch.equal(transmit(codec, x), expected)
    assert codec.payload_bytes(200) == plain.payload_bytes(200) == len(encode(codec, x))
    x[7] = math.nan
    assert transmit(codec, x).isnan().nonzero().tolist() == [[7]]


@properties
@given(vectors(), DENSITIES)
def test_block_topk_keeps_the_groups_with_the_largest_norms(x: Floats, density: str) -> None:
    """The sums of the kept squares are compared, because fp32 may reorder nearly equal norms."""
    groups = group_top_k(x, density, BLOCK, GROUP)
    found = decoded(BlockTopK(float(density), BLOCK, GROUP), x)
    starts = range(0, len(x), GROUP)
    whole = [not found[s : s + GROUP].any() or np.array_equal(found[s : s + GROUP], x[s : s + GROUP]) for s in starts]
    assert all(whole)
    expected = only(x, np.array([i for g in groups for i in range(g * GROUP, min(len(x), (g + 1) * GROUP))], np.int64))
    energies = [float((part.astype(np.float64) ** 2).sum()) for part in (found, expected)]
    assert energies[0] == pytest.approx(energies[1], rel=1e-5, abs=(BLOCK * 2.0**-149) ** 2)


def test_block_topk_is_exact_for_distinct_norms() -> None:
    """The shorter last group is kept if its norm is among the largest, and dropped otherwise."""
    generator = np.random.default_rng(1)
    for numel in (1, 7, 8, 9, 63, 64, 65, 333):
        for last in (1.0, 100.0):
            x = generator.normal(size=numel).astype(np.float32)
            x[-1] *= last
            groups = group_top_k(x, "0.3", BLOCK, GROUP)
            kept = [i for group in groups for i in range(group * GROUP, min(numel, (group + 1) * GROUP))]
            expected = only(x, np.array(kept, dtype=np.int64))
            assert np.array_equal(decoded(BlockTopK(0.3, BLOCK, GROUP), x), expected)


def test_block_topk_payload_is_packed_groups_then_their_values() -> None:
    x = np.random.default_rng(2).normal(size=2 * BLOCK + 11).astype(np.float32)
    x[-1] = 9.0
    groups = group_top_k(x, "0.3", BLOCK, GROUP)
    assert groups[-1] == 17
    assert len(groups) == 3 + 3 + kept_of("0.3", 2)
    values = np.append(x, np.zeros(-len(x) % GROUP, np.float32)).reshape(-1, GROUP)[groups]
    sent = encode(BlockTopK(0.3, BLOCK, GROUP), torch.from_numpy(x)).numpy().tobytes()
    assert sent == packed_bits(groups % (BLOCK // GROUP), 3) + values.tobytes()


def test_padding_of_the_last_group_is_not_decoded() -> None:
    """Two bits have no level at zero, so the padding zeros decode to other values."""
    inner, x = Blockwise(2, 32), torch.arange(1.0, 14.0)
    expected = transmit(inner, torch.cat((x, torch.zeros(3))))
    assert expected[-1] != 0
    assert torch.equal(transmit(BlockTopK(1.0, BLOCK, GROUP, inner), x), expected[:13])


@pytest.mark.parametrize("magnitude", [LARGEST, 2.0**-120])
def test_norms_of_groups_neither_overflow_nor_underflow(magnitude: float) -> None:
    """The squares overflow or underflow in fp32, and the norm of a group overflows, too."""
    x = np.full(BLOCK, 0.5 * magnitude, np.float32)
    x[16:24] = magnitude
    assert np.flatnonzero(decoded(BlockTopK(0.1, BLOCK, GROUP), x)).tolist() == list(range(16, 24))


def test_blocks_must_consist_of_whole_groups() -> None:
    with pytest.raises(AssertionError, match="not whole groups"):
        BlockTopK(0.1, 100, 32)


@pytest.mark.parametrize("density", ["0.01", "0.25", "0.5", "1"])
@properties
@given(numel=st.integers(0, 400), key=st.integers(0, 2**64 - 1))
def test_random_k_keeps_k_elements_of_every_block(density: str, numel: int, key: int) -> None:
    found = np.zeros(numel)
    found[support(RandomK(float(density), BLOCK), numel, key)] = 1
    sizes = [min(BLOCK, numel - start) for start in range(0, numel, BLOCK)]
    counts = [int(found[start : start + BLOCK].sum()) for start in range(0, numel, BLOCK)]
    assert counts == [kept_of(density, size) for size in sizes]


def test_keys_with_different_upper_halves_draw_different_positions() -> None:
    supports = [support(RandomK(0.25, BLOCK), 4 * BLOCK, upper << 32) for upper in range(20)]
    assert len({tuple(found) for found in supports}) == 20
    blocks = {tuple(place % BLOCK for place in supports[0] if place // BLOCK == block) for block in range(4)}
    assert len(blocks) == 4


def test_random_k_sends_only_its_seed_and_the_values() -> None:
    x = torch.arange(1.0, 101.0)
    codec, key = RandomK(0.25, BLOCK), 0xDEADBEEF_00000007
    sent = encode(codec, x, key)
    assert bytes(sent[:4].tolist()) == (0xDEADBEEF).to_bytes(4, "little")
    assert sorted(sent[4:].view(torch.float32).tolist()) == [place + 1.0 for place in support(codec, 100, key)]
    assert [codec.payload_bytes(numel) for numel in (0, 1, 64, 100)] == [0, 8, 4 + 16 * 4, 4 + (16 + 9) * 4]


DRAWS = 2000


MANY_DRAWS = pytest.mark.slow


def drawn(codec: Compressor, x: Tensor) -> Tensor:
    """Return `x` decoded from `DRAWS` messages with different keys: float64 [DRAWS, numel]."""
    return torch.stack([transmit(codec, x, key << 32) for key in range(DRAWS)]).double()


@MANY_DRAWS
def test_every_element_and_pair_is_drawn_with_its_probability() -> None:
    """Frequencies over n keys are within 5 sqrt(p (1 - p) / n) of p = k / m, and of k (k - 1) / m (m - 1) for pairs."""
    width, k = 16, 4
    ones = (drawn(RandomK(k / width, width), torch.ones(3 * width + 8)) != 0).double()
    together = ones.T @ ones / DRAWS
    for start, size, count in ((0, width, k), (2 * width, width, k), (3 * width, 8, 2)):
        part = together[start : start + size, start : start + size]
        pair = count * (count - 1) / (size * (size - 1))
        expected = torch.full((size, size), pair).fill_diagonal_(count / size)
        assert ((part - expected).abs() <= 5 * (expected * (1 - expected) / DRAWS).sqrt()).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rescale", [False, True])
def test_a_non_finite_element_that_is_not_drawn_is_reported(rescale: bool, bad: float) -> None:
    codec = RandomK(0.1, BLOCK, rescale=rescale)
    dropped = sorted(set(range(BLOCK)) - set(support(codec, BLOCK, 5 << 32)))
    x = torch.ones(BLOCK)
    x[dropped[0]] = bad
    assert not transmit(codec, x, 5 << 32).isfinite().all()


def test_rescaling_stays_in_the_range_of_fp32() -> None:
    x = torch.full((BLOCK,), LARGEST)
    found = transmit(RandomK(0.25, BLOCK, rescale=True), x)
    assert found[found != 0].tolist() == [LARGEST] * 16


@pytest.mark.parametrize("inner", [Cast(torch.bfloat16), Blockwise(4, 32), Blockwise(8, 32, True)], ids=repr)
@pytest.mark.parametrize(
    "outer", [TopK(0.3, scope="tensor"), RandomK(0.3, BLOCK), BlockTopK(0.5, BLOCK, GROUP)], ids=repr
)
def test_the_kept_values_are_compressed_as_one_vector(outer: TopK | RandomK | BlockTopK, inner: Compressor) -> None:
    """They are encoded with the whole key, so stochastic rounding differs between ranks with equal positions."""
    x, key = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(4)), 5 << 32 | 9
    values = encode(outer, x, key)[-4 * outer.kept(x.numel()) :].view(torch.float32)
    sent = encode(replace(outer, values=inner), x, key)
    assert torch.equal(sent[-inner.payload_bytes(len(values)) :], encode(inner, values, key))


def test_all_senders_of_a_message_draw_the_same_positions() -> None:
    """The sum over ranks is as sparse as each message. The keys for rounding differ."""
    keys = [message_key((7, 3, 0, 1), sender) for sender in range(4)]
    codec, x = RandomK(0.1, 64), torch.ones(300)
    first, *others = [transmit(codec, x, key) for key in keys]
    assert all(torch.equal(first, other) for other in others)
    assert len({key & 0xFFFFFFFF for key in keys}) == len(keys)
    assert not torch.equal(first, transmit(codec, x, message_key((7, 4, 0, 1), 0)))


@properties
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_keys_with_equal_upper_halves_draw_equal_positions(numel: int, upper: int, one: int, other: int) -> None:
    codec = RandomK(0.3, BLOCK)
    assert support(codec, numel, upper << 32 | one) == support(codec, numel, upper << 32 | other)


@MANY_DRAWS
def test_rescaled_random_k_is_unbiased() -> None:
    """The mean over n keys is within 5 standard errors, x sqrt((m / k - 1) / n)."""
    x = torch.linspace(-3, 5, 2 * 32 + 10)
    mean = drawn(RandomK(0.25, 32, rescale=True), x).mean(dim=0)
    ratio = torch.cat((torch.full((64,), 32 / 8), torch.full((10,), 10 / 3)))
    assert ((mean - x).abs() <= 5 * x.abs() * ((ratio - 1) / DRAWS).sqrt() + 1e-6).all()


@MANY_DRAWS
def test_the_mean_squared_error_of_random_k_is_one_minus_density() -> None:
    """E|x - C(x)|^2 = (1 - k / m) |x|^2 (Stich et al., arXiv:1809.07599), within 5 standard errors."""
    x = torch.randn(128, generator=torch.Generator().manual_seed(3))
    lost = (drawn(RandomK(0.25, 32), x) - x).square().sum(dim=1) / x.double().square().sum()
    assert abs(float(lost.mean()) - 0.75) <= 5 * float(lost.std()) / math.sqrt(DRAWS)


@pytest.mark.parametrize(
    "codec",
    [TopK(0.25, BLOCK), TopK(0.25, scope="tensor"), TopK(0.25, scope="threshold"), BlockTopK(0.25, BLOCK, GROUP)],
    ids=repr,
)
@properties
@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_the_squared_error_of_top_k_is_at_most_one_minus_density(codec: Compressor, groups: int, seed: int) -> None:
    """|x - C(x)|^2 <= (1 - k / n) |x|^2 for every x (Stich et al., definition 2.1)."""
    x = np.random.default_rng(seed).normal(size=groups * GROUP).astype(np.float32)
    lost = float(((decoded(codec, x) - x).astype(np.float64) ** 2).sum())
    assert lost <= 0.75 * float((x.astype(np.float64) ** 2).sum()) * (1 + 1e-6)
