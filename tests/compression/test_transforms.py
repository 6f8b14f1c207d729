"""Transforms against their definitions in float64, and the properties that reducers rely on."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.segments import Segment, segments_of
from deepspeed_compress.compression.transforms import DCT, Hadamard, Identity, Transform
from tests.support.codecs import noise
from tests.support.properties import properties

SAMPLED = pytest.mark.sampled(3)

Doubles = NDArray[np.float64]
WIDTHS = {"wide": 13, "narrow": 3, "column": 1}
TRANSFORMS: tuple[Transform, ...] = (Identity(), Hadamard(16, seed=3), Hadamard(1), DCT(WIDTHS, 4), DCT(WIDTHS))
every_transform = pytest.mark.parametrize("transform", TRANSFORMS, ids=repr)


RANGES = st.tuples(st.sampled_from([*WIDTHS, "bias"]), st.integers(0, 60), st.integers(0, 150))
LAYOUTS = st.lists(RANGES, max_size=5).map(segments_of)


def length(segments: Sequence[Segment]) -> int:
    return sum(segment.numel for segment in segments)


def dct(size: int) -> Doubles:
    """Return the matrix of the DCT-II: X_k = sqrt((1 or 2) / N) sum_n x_n cos(pi (n + 1/2) k / N)."""
    rows = [[math.cos(math.pi * (n + 0.5) * k / size) for n in range(size)] for k in range(size)]
    return np.array(rows) * np.sqrt(np.array([[1.0]] + [[2.0]] * (size - 1)) / size)


def hadamard(size: int) -> Doubles:
    return np.array([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]) / math.sqrt(size)


@SAMPLED
@every_transform
@properties
@given(segments=LAYOUTS, seed=st.integers(0, 99))
def test_transforms_preserve_norms_and_inner_products_and_can_be_inverted(
    transform: Transform, segments: tuple[Segment, ...], seed: int
) -> None:
    x, y = noise(length(segments), seed), noise(length(segments), seed + 1)
    before = x.clone()
    a, b = transform.forward(x, segments), transform.forward(y, segments)
    assert a.dtype == torch.float32
    assert a.shape == x.shape
    bound = 1e-5 * float(x.norm() * y.norm())
    assert abs(float(a @ b) - float(x @ y)) <= bound
    assert abs(float(a @ a) - float(x @ x)) <= 1e-5 * float(x @ x)
    coefficients = a.clone()
    assert torch.allclose(transform.inverse(a, segments), x, rtol=0, atol=1e-5)
    assert torch.equal(a, coefficients)
    assert torch.equal(x, before)


@SAMPLED
@every_transform
@properties
@given(segments=LAYOUTS)
def test_coefficients_can_be_summed_before_the_inverse(transform: Transform, segments: tuple[Segment, ...]) -> None:
    parts = [noise(length(segments), seed) for seed in range(3)]
    total = torch.stack([transform.forward(part, segments) for part in parts]).sum(dim=0)
    assert torch.allclose(transform.inverse(total, segments), torch.stack(parts).sum(dim=0), rtol=0, atol=2e-5)


@SAMPLED
@every_transform
@properties
@given(segments=LAYOUTS)
def test_the_same_layout_gives_the_same_bits(transform: Transform, segments: tuple[Segment, ...]) -> None:
    """This also holds for a view into a larger buffer."""
    x = noise(length(segments))
    buffer = torch.cat((torch.ones(3), x, torch.ones(2)))
    view = buffer[3 : 3 + x.numel()]
    assert torch.equal(transform.forward(x, segments), transform.forward(view, segments))
    assert torch.equal(transform.inverse(x, segments), transform.inverse(view, segments))


@every_transform
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_element_leads_to_non_finite_results_in_both_directions(transform: Transform, bad: float) -> None:
    segments = segments_of([("wide", 5, 140), ("bias", 0, 9)])
    for place in range(length(segments)):
        x = noise(length(segments))
        x[place] = bad
        assert not transform.forward(x, segments).isfinite().all()
        assert not transform.inverse(x, segments).isfinite().all()


@pytest.mark.parametrize("numel", [0, 1, 2, 15, 16, 32, 47, 63])
def test_hadamard_multiplies_each_block_of_signed_elements_by_its_matrix(numel: int) -> None:
    """A remainder of 15 elements has blocks of 8, 4, 2 and 1."""
    x = noise(numel).double().numpy()
    uniform = reference.uniform(16, 3, torch.device("cpu")).numpy()
    signs = np.resize(np.where(uniform < 0.5, -1.0, 1.0), numel)
    assert numel < 15 or {-1.0, 1.0} == set(signs)
    sizes = [16] * (numel // 16) + [bit for bit in (8, 4, 2, 1) if numel % 16 & bit]
    expected = [hadamard(size) @ part for size, part in zip(sizes, np.split(signs * x, np.cumsum(sizes)), strict=False)]
    found = Hadamard(16, seed=3).forward(torch.from_numpy(x).float(), ()).numpy()
    assert np.allclose(found, np.concatenate([*expected, np.zeros(0)]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1 << bit for bit in range(13)])
def test_hadamard_spreads_an_outlier_evenly_over_its_block(size: int) -> None:
    x = torch.zeros(3 * size)
    x[size + size // 3] = 8.0
    magnitudes = Hadamard(size).forward(x, ()).abs().view(3, size)
    assert torch.equal(magnitudes[::2], torch.zeros(2, size))
    assert torch.allclose(magnitudes[1], torch.full((size,), 8 / math.sqrt(size)))


def test_the_seed_of_hadamard_determines_the_signs() -> None:
    x = noise(64)
    found = [Hadamard(64, seed).forward(x, ()) for seed in range(4)]
    assert not any(torch.equal(one, other) for one, other in pairwise(found))


@pytest.mark.parametrize("size", [0, 3, 12])
def test_the_block_size_of_hadamard_must_be_a_power_of_two(size: int) -> None:
    with pytest.raises(AssertionError, match="not a power of two"):
        Hadamard(size)


@pytest.mark.parametrize(("rows", "width"), [(4, 4), (8, 12), (9, 13), (3, 5), (1, 9), (9, 1), (5, 4), (4, 7), (2, 2)])
def test_dct_transforms_every_tile_in_two_dimensions(rows: int, width: int) -> None:
    """Full tiles come first, in order, followed by smaller ones."""
    matrix = noise(rows * width).double().numpy().reshape(rows, width)
    tiles = [matrix[top : top + 4, left : left + 4] for top in range(0, rows, 4) for left in range(0, width, 4)]
    tiles.sort(key=lambda tile: (-tile.size, tile.shape))
    expected = [dct(tile.shape[0]) @ tile @ dct(tile.shape[1]).T for tile in tiles]
    found = DCT({"m": width}, 4).forward(
        torch.from_numpy(matrix).float().view(-1), segments_of([("m", 0, rows * width)])
    )
    assert np.allclose(found.numpy(), np.concatenate([tile.ravel() for tile in expected]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("numel", [1, 3, 4, 5, 11])
def test_dct_of_a_vector_transforms_runs_of_elements(numel: int) -> None:
    x = noise(numel).double().numpy()
    expected = [dct(len(part)) @ part for part in np.split(x, range(4, numel, 4))]
    found = DCT({}, 4).forward(torch.from_numpy(x).float(), segments_of([("v", 7, numel)])).numpy()
    assert np.allclose(found, np.concatenate(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "cuts", [(0, 54), (0, 1, 54), (0, 5, 7, 54), (0, 17, 18, 19, 40, 54), (3, 50), (7, 11), (5, 9)]
)
def test_dct_covers_whole_rows_with_tiles_for_any_cut_of_a_matrix(cuts: tuple[int, ...]) -> None:
    """All elements are 1, so each tile has one nonzero coefficient, whose square is the size of the tile."""
    width, tile = 6, 4
    ranges = [("m", begin, end - begin) for begin, end in pairwise(cuts)]
    sizes: list[int] = []
    for _, begin, numel in ranges:
        first, last = -(-begin // width), (begin + numel) // width
        rows, ends = last - first, [first * width - begin, begin + numel - last * width]
        runs = [numel] if rows <= 0 else ends
        sizes += [min(tile, run - start) for run in runs for start in range(0, run, tile)]
        sizes += [min(tile, rows - top) * min(tile, width - left) for top in range(0, rows, tile) for left in (0, 4)]
    segments = segments_of(ranges)
    found = DCT({"m": width}, tile).forward(torch.ones(length(segments)), segments)
    squares = found[found.abs() > 1e-4].square()
    assert np.allclose(sorted(squares.tolist()), sorted(sizes), rtol=1e-5)


def test_the_coefficients_of_a_full_tile_fill_one_block() -> None:
    """The coefficients of a block depend on the elements of one tile, which no other coefficients depend on."""
    tile, widths = 4, {"a": 10, "b": 9}
    segments = segments_of([("bias", 0, 5), ("a", 3, 100), ("b", 0, 45)])
    x = torch.eye(length(segments))
    touched = [(DCT(widths, tile).inverse(row, segments).abs() > 1e-7).nonzero().view(-1).tolist() for row in x]
    # "a" has the whole rows 1 to 9, and "b" has rows 0 to 4: 2 x 2 and 1 x 2 full tiles.
    full = 2 * 2 + 1 * 2
    blocks = [set().union(*map(set, touched[16 * block : 16 * (block + 1)])) for block in range(full)]
    assert [len(block) for block in blocks] == [16] * full
    assert len(set().union(*blocks)) == 16 * full
    rest = set().union(*map(set, touched[16 * full :]))
    assert rest.isdisjoint(set().union(*blocks))


def test_a_vector_that_does_not_match_its_segments_is_refused() -> None:
    with pytest.raises(AssertionError, match="7 elements"):
        DCT({}).forward(torch.ones(7), segments_of([("v", 0, 6)]))


@every_transform
@properties
@given(segments=LAYOUTS, seed=st.integers(0, 99))
def test_forward_inverts_the_inverse(transform: Transform, segments: tuple[Segment, ...], seed: int) -> None:
    coefficients = noise(length(segments), seed)
    back = transform.forward(transform.inverse(coefficients, segments), segments)
    assert torch.allclose(back, coefficients, rtol=0, atol=1e-5)


def test_the_identity_does_not_copy() -> None:
    x = noise(5)
    assert Identity().forward(x, ()) is x
    assert Identity().inverse(x, ()) is x


def test_a_smooth_matrix_needs_few_coefficients() -> None:
    """The energy of a slow wave is in the low frequencies of every tile."""
    rows, columns = torch.meshgrid(torch.arange(128.0), torch.arange(64.0), indexing="ij")
    wave = torch.cos(rows / 40 + columns / 30).reshape(-1)
    found = DCT({"m": 64}).forward(wave, segments_of([("m", 0, wave.numel())])).view(2, 64, 64)
    assert float(found[:, :4, :4].square().sum()) > 0.99 * float(wave.square().sum())
