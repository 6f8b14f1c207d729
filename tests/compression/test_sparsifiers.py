"""Sparsifiers against their definitions: what is kept, what travels, and what the papers promise of it."""

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
from deepspeed_compress.compression.compressors.block_topk import BlockTopK
from deepspeed_compress.compression.compressors.randomk import RandomK
from deepspeed_compress.compression.compressors.topk import TopK
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
def vectors(draw: st.DrawFn, most: int = 700) -> Floats:
    """Normal numbers of a random magnitude, denormal to nearly overflowing; or small integers, hence with many ties."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numel = draw(st.integers(1, most))
    if draw(st.booleans()):
        return generator.integers(-3, 3, numel, endpoint=True).astype(np.float32)
    values = generator.normal(size=numel).clip(-3.9, 3.9) * 2.0 ** draw(st.integers(-140, 126))
    return values.astype(np.float32)


def decoded(codec: Compressor, x: Floats, key: int = 1) -> Floats:
    found: Floats = transmit(codec, torch.from_numpy(x), key).numpy()
    return found


def support(codec: Compressor, numel: int, key: int) -> list[int]:
    """Positions that are sent of `numel` ones."""
    return transmit(codec, torch.ones(numel), key).nonzero().view(-1).tolist()


@properties
@given(vectors(), DENSITIES)
def test_topk_of_blocks_keeps_the_largest_and_the_first_of_equals(x: Floats, density: str) -> None:
    expected = only(x, top_k(x, density, BLOCK))
    assert np.array_equal(decoded(TopK(float(density), BLOCK), x), expected)


@pytest.mark.parametrize("scope", WHOLE)
@properties
@given(x=vectors(), density=DENSITIES)
def test_topk_of_the_message_keeps_the_largest_and_the_first_of_equals(scope: Scope, x: Floats, density: str) -> None:
    expected = only(x, top_k(x, density, len(x)))
    assert np.array_equal(decoded(TopK(float(density), scope=scope), x), expected)


@pytest.mark.parametrize("scope", WHOLE)
@properties
@given(x=vectors(), density=DENSITIES)
def test_an_index_of_the_message_takes_the_bits_of_its_length(scope: Scope, x: Floats, density: str) -> None:
    positions = top_k(x, density, len(x))
    sent = encode(TopK(float(density), scope=scope), torch.from_numpy(x)).numpy().tobytes()
    assert sent == packed_bits(positions, (len(x) - 1).bit_length()) + x[positions].tobytes()


def sampled_cases() -> dict[str, Tensor]:
    """Rows long enough for a sample, on which its threshold is good, too high, too low, and among ties."""
    numel = 40_000
    normal = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    return {
        "good": normal,
        "too_high": torch.where(torch.arange(numel) % 100 == 0, 10 + normal.abs(), normal),
        "too_low": torch.where(torch.arange(numel) % 100 == 0, 0.0, normal),
        "ties": (normal * 2).round(),
        "zeros": torch.zeros(numel),
        "non_finite": torch.where(torch.arange(numel) % 5000 == 7, math.nan, normal),
    }


@pytest.mark.parametrize("k", [1, 40, 400, 20_000])
@pytest.mark.parametrize("case", sampled_cases())
def test_the_sampled_threshold_finds_the_exact_top_k(case: str, k: int) -> None:
    row = sampled_cases()[case].view(1, -1)
    assert torch.equal(reference.top_k_sampled(row, k), reference.top_k_rows(row, k))


def test_the_sampled_threshold_spares_the_search_of_all_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sample is representative, few survive; where it is not, all elements are searched."""
    searched: list[int] = []

    def counting(rows: Tensor, k: int) -> Tensor:
        searched.append(rows.numel())
        return rows[:, :k].long()

    monkeypatch.setattr(reference, "top_k_rows", counting)
    for case in ("good", "too_high"):
        reference.top_k_sampled(sampled_cases()[case].view(1, -1), 1000)
    assert searched == [40_000]


@properties
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_top_k_rows_is_the_stable_sort_by_magnitude(width: int, k: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(-4, 4, (3, width), endpoint=True).astype(np.float32)
    expected = np.sort(np.argsort(-np.abs(rows), axis=1, kind="stable")[:, : min(k, width)], axis=1)
    assert reference.top_k_rows(torch.from_numpy(rows), min(k, width)).tolist() == expected.tolist()


@properties
@given(st.integers(0, 32), st.data())
def test_bits_of_any_width_are_one_little_endian_string(width: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 2**width - 1), max_size=20))
    expected = packed_bits(np.array(values, dtype=np.int64), width)
    packed = torch.full((len(expected),), 0xFF, dtype=torch.uint8)
    reference.pack_bits(torch.tensor(values, dtype=torch.int64), width, packed)
    assert bytes(packed.tolist()) == expected
    assert reference.unpack_bits(packed, width, len(values)).tolist() == values


@pytest.mark.parametrize("scope", ["block", *WHOLE])
def test_values_below_the_least_magnitude_are_sent_as_zero(scope: Scope) -> None:
    """The size stays; NaN and values of exactly that magnitude are sent."""
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
def test_structured_topk_keeps_the_groups_of_largest_norm(x: Floats, density: str) -> None:
    """Compared by what is kept of the norms: fp32 may order nearly equal ones otherwise."""
    groups = group_top_k(x, density, BLOCK, GROUP)
    found = decoded(BlockTopK(float(density), BLOCK, GROUP), x)
    starts = range(0, len(x), GROUP)
    whole = [not found[s : s + GROUP].any() or np.array_equal(found[s : s + GROUP], x[s : s + GROUP]) for s in starts]
    assert all(whole)
    expected = only(x, np.array([i for g in groups for i in range(g * GROUP, min(len(x), (g + 1) * GROUP))], np.int64))
    energies = [float((part.astype(np.float64) ** 2).sum()) for part in (found, expected)]
    assert energies[0] == pytest.approx(energies[1], rel=1e-5, abs=(BLOCK * 2.0**-149) ** 2)


def test_structured_topk_on_distinct_norms_is_exact() -> None:
    """Odd lengths too: the shorter last group is kept when its norm is among the largest, else it is dropped."""
    generator = np.random.default_rng(1)
    for numel in (1, 7, 8, 9, 63, 64, 65, 333):
        for last in (1.0, 100.0):
            x = generator.normal(size=numel).astype(np.float32)
            x[-1] *= last
            groups = group_top_k(x, "0.3", BLOCK, GROUP)
            kept = [i for group in groups for i in range(group * GROUP, min(numel, (group + 1) * GROUP))]
            expected = only(x, np.array(kept, dtype=np.int64))
            assert np.array_equal(decoded(BlockTopK(0.3, BLOCK, GROUP), x), expected)


def test_structured_payload_is_packed_groups_then_their_values() -> None:
    x = np.random.default_rng(2).normal(size=2 * BLOCK + 11).astype(np.float32)
    x[-1] = 9.0
    groups = group_top_k(x, "0.3", BLOCK, GROUP)
    assert groups[-1] == 17
    assert len(groups) == 3 + 3 + kept_of("0.3", 2)
    values = np.append(x, np.zeros(-len(x) % GROUP, np.float32)).reshape(-1, GROUP)[groups]
    sent = encode(BlockTopK(0.3, BLOCK, GROUP), torch.from_numpy(x)).numpy().tobytes()
    assert sent == packed_bits(groups % (BLOCK // GROUP), 3) + values.tobytes()


def test_what_lies_beyond_the_end_is_not_decoded() -> None:
    """Two bits have no level at zero, so the zeros there decode as something else."""
    inner, x = Blockwise(2, 32), torch.arange(1.0, 14.0)
    expected = transmit(inner, torch.cat((x, torch.zeros(3))))
    assert expected[-1] != 0
    assert torch.equal(transmit(BlockTopK(1.0, BLOCK, GROUP, inner), x), expected[:13])


@pytest.mark.parametrize("magnitude", [LARGEST, 2.0**-120])
def test_structured_norms_neither_overflow_nor_underflow(magnitude: float) -> None:
    """Squares are beyond fp32 here, upwards and downwards; the norm of the first group is beyond it too."""
    x = np.full(BLOCK, 0.5 * magnitude, np.float32)
    x[16:24] = magnitude
    assert np.flatnonzero(decoded(BlockTopK(0.1, BLOCK, GROUP), x)).tolist() == list(range(16, 24))


def test_blocks_are_of_whole_groups() -> None:
    with pytest.raises(AssertionError, match="not whole groups"):
        BlockTopK(0.1, 100, 32)


@pytest.mark.parametrize("density", ["0.01", "0.25", "0.5", "1"])
@properties
@given(numel=st.integers(0, 400), key=st.integers(0, 2**64 - 1))
def test_random_k_keeps_k_of_every_block(density: str, numel: int, key: int) -> None:
    found = np.zeros(numel)
    found[support(RandomK(float(density), BLOCK), numel, key)] = 1
    sizes = [min(BLOCK, numel - start) for start in range(0, numel, BLOCK)]
    counts = [int(found[start : start + BLOCK].sum()) for start in range(0, numel, BLOCK)]
    assert counts == [kept_of(density, size) for size in sizes]


@properties
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_equal_upper_halves_of_keys_draw_equal_positions(numel: int, upper: int, one: int, other: int) -> None:
    codec = RandomK(0.3, BLOCK)
    assert support(codec, numel, upper << 32 | one) == support(codec, numel, upper << 32 | other)


def test_other_upper_halves_draw_other_positions_and_blocks_differ() -> None:
    supports = [support(RandomK(0.25, BLOCK), 4 * BLOCK, upper << 32) for upper in range(20)]
    assert len({tuple(found) for found in supports}) == 20
    blocks = {tuple(place % BLOCK for place in supports[0] if place // BLOCK == block) for block in range(4)}
    assert len(blocks) == 4


def test_random_k_sends_its_seed_and_the_values_alone() -> None:
    x = torch.arange(1.0, 101.0)
    codec, key = RandomK(0.25, BLOCK), 0xDEADBEEF_00000007
    sent = encode(codec, x, key)
    assert bytes(sent[:4].tolist()) == (0xDEADBEEF).to_bytes(4, "little")
    assert sorted(sent[4:].view(torch.float32).tolist()) == [place + 1.0 for place in support(codec, 100, key)]
    assert [codec.payload_bytes(numel) for numel in (0, 1, 64, 100)] == [0, 8, 4 + 16 * 4, 4 + (16 + 9) * 4]


DRAWS = 4000


def drawn(codec: Compressor, x: Tensor) -> Tensor:
    """What a receiver makes of `x` in `DRAWS` messages: float64 [DRAWS, numel]."""
    return torch.stack([transmit(codec, x, key << 32) for key in range(DRAWS)]).double()


def test_every_element_and_pair_is_drawn_with_its_probability() -> None:
    """Frequencies over n keys within 5 sqrt(p (1 - p) / n) of p = k / m, and k (k - 1) / m (m - 1) for pairs."""
    width, k = 16, 4
    ones = (drawn(RandomK(k / width, width), torch.ones(3 * width + 8)) != 0).double()
    together = ones.T @ ones / DRAWS
    for start, size, count in ((0, width, k), (2 * width, width, k), (3 * width, 8, 2)):
        part = together[start : start + size, start : start + size]
        pair = count * (count - 1) / (size * (size - 1))
        expected = torch.full((size, size), pair).fill_diagonal_(count / size)
        assert ((part - expected).abs() <= 5 * (expected * (1 - expected) / DRAWS).sqrt()).all()


def test_rescaled_random_k_is_unbiased() -> None:
    """The mean over n keys is within 5 standard errors, x sqrt((m / k - 1) / n) each; blocks and rest alike."""
    x = torch.linspace(-3, 5, 2 * 32 + 10)
    mean = drawn(RandomK(0.25, 32, rescale=True), x).mean(dim=0)
    ratio = torch.cat((torch.full((64,), 32 / 8), torch.full((10,), 10 / 3)))
    assert ((mean - x).abs() <= 5 * x.abs() * ((ratio - 1) / DRAWS).sqrt() + 1e-6).all()


def test_random_k_contracts_in_the_mean_exactly_by_one_minus_density() -> None:
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
def test_top_k_contracts_by_one_minus_density(codec: Compressor, groups: int, seed: int) -> None:
    """|x - C(x)|^2 <= (1 - k / n) |x|^2 for every x (Stich et al., definition 2.1)."""
    x = np.random.default_rng(seed).normal(size=groups * GROUP).astype(np.float32)
    lost = float(((decoded(codec, x) - x).astype(np.float64) ** 2).sum())
    assert lost <= 0.75 * float((x.astype(np.float64) ** 2).sum()) * (1 + 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rescale", [False, True])
def test_a_non_finite_element_that_is_not_drawn_shows(rescale: bool, bad: float) -> None:
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
    """With the whole key, so that stochastic rounding differs by rank even where the positions do not."""
    x, key = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(4)), 5 << 32 | 9
    values = encode(outer, x, key)[-4 * outer.kept(x.numel()) :].view(torch.float32)
    sent = encode(replace(outer, values=inner), x, key)
    assert torch.equal(sent[-inner.payload_bytes(len(values)) :], encode(inner, values, key))


def test_senders_of_a_message_draw_the_same_positions() -> None:
    """So a sum over ranks is as sparse as each part; their rounding has keys that differ."""
    keys = [message_key((7, 3, 0, 1), sender) for sender in range(4)]
    codec, x = RandomK(0.1, 64), torch.ones(300)
    first, *others = [transmit(codec, x, key) for key in keys]
    assert all(torch.equal(first, other) for other in others)
    assert len({key & 0xFFFFFFFF for key in keys}) == len(keys)
    assert not torch.equal(first, transmit(codec, x, message_key((7, 4, 0, 1), 0)))
