"""The C++ kernels against plain torch: elementwise operations are compared bit for bit."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_compress.compression.kernels import SWITCH, implementations, reference
from deepspeed_compress.compression.kernels.arguments import FIRST, BlockFormat, ResidualBuffers
from tests.gpu.comparisons import same_bits
from tests.gpu.operations import COMPARISONS, FORMS, dequantize, quantize, top_k, top_k_of_sum
from tests.support.kernels import message_of, operations, quantize_blocks
from tests.support.properties import properties

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
cpu = implementations(CPU)["cpu"]
KEPT = (torch.float32, torch.bfloat16)
OTHER_FORMS = {
    "4 bits, blocks ending within a byte": BlockFormat("absmax", 7, 4, 33),
    "3 bits, blocks of 24": BlockFormat("absmax", 3, 3, 24),
    "qsgd, 5 bits": BlockFormat("norm", 15, 5, 50),
    "sign, blocks of odd size": BlockFormat("mean", 1, 1, 7),
    "eight levels": BlockFormat("eight", 10, 3, 64),
    "eight levels, blocks ending within a byte": BlockFormat("eight", 10, 3, 33),
    "three levels": BlockFormat("ternary", 1, 2, 64),
    "three levels, blocks of odd size": BlockFormat("ternary", 1, 2, 7),
}
ALL_FORMS = {**FORMS, **OTHER_FORMS}
SIZES = (0, 1, 5, 64, 65, 300, 1000, 5000)
ROWS = {
    row.name: row
    for row in (
        *COMPARISONS,
        *(quantize(form, torch.float16, torch.float32, random=True) for form in ALL_FORMS.values()),
        *(quantize(form, torch.bfloat16, torch.bfloat16) for form in OTHER_FORMS.values()),
        *(quantize(form, torch.float32, kept, decay=1.0) for form in ALL_FORMS.values() for kept in KEPT),
        *(dequantize(form, torch.float32) for form in OTHER_FORMS.values()),
        *(dequantize(form, torch.float32, factor) for form in ALL_FORMS.values() for factor in (1.0, -1.0)),
        *(top_k(*shape) for shape in ((4096, 1000), (5000, 30))),
        *(top_k_of_sum(*shape, kept) for shape in ((1, 1), (64, 64), (5000, 30)) for kept in KEPT),
    )
    if row.operation != "compressor"
}


def encoded(
    ops: object, x: Tensor, form: BlockFormat, dtype: torch.dtype, key: int | None, residual: ResidualBuffers | None
) -> tuple[Tensor, Tensor]:
    blocks = -(-x.numel() // form.block_size)
    numbers = torch.full((blocks,), 7.0, dtype=dtype)
    codes = torch.full((form.code_bytes(x.numel()),), 0xFF, dtype=torch.uint8)
    quantize_blocks(ops, x, form, numbers, codes, key, residual)
    return numbers, codes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [*SIZES, 1024, 3001])
def test_sums_of_squares_differ_only_by_the_order_of_summation(numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator).to(dtype)
    assert float(cpu.square_norm(x)) == pytest.approx(float(x.double() @ x.double()), rel=1e-6)
    # Sums of small integers are exact in any order.
    x = torch.randint(-7, 8, (numel,), generator=generator).to(dtype)
    exact = float(x.double() @ x.double())
    assert float(cpu.square_norm(x)) == exact
    # torch computes a square root, which is rounded to fp32.
    assert float(reference.square_norm(x)) == pytest.approx(exact, rel=torch.finfo(torch.float32).eps)
    for bad in (math.nan, math.inf) if numel else ():
        x[numel // 2] = bad
        assert not math.isfinite(cpu.square_norm(x))
        assert not math.isfinite(reference.square_norm(x))


@pytest.mark.parametrize("name", ROWS)
def test_kernels_have_the_bits_of_plain_torch(name: str) -> None:
    """The order of a sum changes few scales, and none of these."""
    row = ROWS[name]
    row = replace(row, rule=same_bits) if row.operation == "quantize_messages" else row
    for numel in (*SIZES, *row.sizes):
        assert row.differs(cpu, CPU, numel) == ""
    assert row.differs_if_alike(cpu, CPU) == ""


@pytest.mark.parametrize("dtype", KEPT)
def test_a_residual_may_be_updated_in_place(dtype: torch.dtype) -> None:
    x, form = torch.randn(300, generator=torch.Generator().manual_seed(0)), FORMS["4 bits"]
    before = torch.linspace(-1, 1, 300).to(dtype)
    after = torch.empty_like(before)
    encoded(cpu, x, form, torch.float32, None, ResidualBuffers(before, 1.0, after))
    in_place = before.clone()
    encoded(cpu, x, form, torch.float32, None, ResidualBuffers(in_place, 1.0, in_place))
    assert torch.equal(in_place, after)
    cpu.top_k_rows_of_sum(x.view(3, 100), 7, ResidualBuffers(before, 0.9, after))
    cpu.top_k_rows_of_sum(x.view(3, 100), 7, ResidualBuffers(before, 0.9, before))
    assert torch.equal(before, after)


def test_a_finite_residual_stays_finite() -> None:
    x, after = torch.full((8,), torch.finfo(torch.float32).max), torch.empty(8, dtype=torch.bfloat16)
    x[0] = -1.0
    form = BlockFormat("mean", 1, 1, 8)
    for ops in (cpu, reference):
        encoded(ops, x, form, torch.float32, None, ResidualBuffers(torch.zeros_like(after), 1.0, after))
        assert after.isfinite().all()


@pytest.mark.parametrize("ranks", [0, 1, 3])
@pytest.mark.parametrize("form", ALL_FORMS.values(), ids=ALL_FORMS)
def test_sums_of_messages_match_the_reference(form: BlockFormat, ranks: int) -> None:
    x, *sent = torch.randn(1 + ranks, 1000, generator=torch.Generator().manual_seed(ranks))
    table, empty, _ = message_of(form, 1000, torch.empty(-(-1000 // form.block_size)))
    payloads = empty.repeat(ranks, 1)
    for one, payload in zip(sent, payloads, strict=True):
        reference.quantize_messages(one, FIRST, form, payload, table, None, None)
    # Without `add`, the output is overwritten, even if it is NaN.
    for add, before in ((True, x), (False, torch.full_like(x, torch.nan))):
        out, expected = before.clone(), before.clone()
        for ops, target in ((cpu, out), (reference, expected)):
            ops.dequantize_messages(payloads, form, table, target, FIRST, 1 / 3, add)
        assert same_bits([out], [expected]) == ""


def test_scales_that_are_sums_differ_at_most_by_rounding() -> None:
    """The order of an fp64 sum changes the fp32 scale by one unit, in one of about 2**29 / n blocks of n elements."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    for form in (FORMS["qsgd, 4 bits"], FORMS["sign"]):
        scales = [encoded(ops, x, form, torch.float32, None, None)[0] for ops in (cpu, reference)]
        distance = (scales[0].view(torch.int32) - scales[1].view(torch.int32)).abs()
        assert int(distance.max()) <= 1
        assert int(distance.sum()) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_casts_become_infinite_at_the_same_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([65504.0, 65519.9, 65520.0, -7e4, 3.4e38, -3.4e38])
    out, expected = torch.empty(x.numel(), dtype=dtype), torch.empty(x.numel(), dtype=dtype)
    cpu.cast(x, out)
    reference.cast(x, expected)
    assert same_bits([out], [expected]) == ""


@pytest.mark.parametrize(
    "shape", [(2, 3, 64, 64), (3, 1, 64, 32), (2, 2, 32, 64), (2, 1, 37, 64), (5, 1, 1, 64), (1, 1, 7, 3)]
)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.06, 0.0625, 0.07, 0.3])
def test_the_inverse_dct_of_few_coefficients_matches_the_reference(share: float, shape: tuple[int, ...]) -> None:
    """The sparse and the dense algorithm differ only by rounding. -0.0 counts as zero; NaN and infinity do not."""
    generator = torch.Generator().manual_seed(3)
    tiles = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < share)
    out, expected = torch.empty_like(tiles), torch.empty_like(tiles)
    for sign in (1.0, -1.0):
        cpu.dct_tiles(tiles * sign, out, True)
        reference.dct_tiles(tiles * sign, expected, True)
        assert float((out - expected).abs().max()) <= 2e-6 * max(1.0, float(tiles.abs().max()))
    for bad in (math.nan, math.inf, -math.inf):
        spoiled = tiles.clone()
        spoiled[-1, -1, -1, -1] = bad
        cpu.dct_tiles(spoiled, out, True)
        assert not out[-1, -1].isfinite().any()
        assert out[:-1].isfinite().all()


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(3, 2, 64, 64), (2, 1, 32, 32), (5, 1, 1, 64), (1, 1, 16, 64), (2, 2, 1, 1)])
def test_transforms_match_the_reference_to_rounding(shape: tuple[int, ...], inverse: bool) -> None:
    tiles = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    for name in ("dct_tiles", "hadamard_tiles"):
        out, expected = torch.empty_like(tiles), torch.empty_like(tiles)
        getattr(cpu, name)(tiles, out, inverse)
        getattr(reference, name)(tiles, expected, inverse)
        # A few units in the last place of the largest coefficient, after 4096 products of 24 bits.
        assert float((out - expected).abs().max()) <= 2e-6 * float(tiles.abs().max())


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("height", "width"), [(64, 64), (3, 64), (7, 5), (128, 64)])
def test_strided_tiles_of_a_matrix_are_transformed(height: int, width: int, inverse: bool) -> None:
    matrix = torch.randn(2 * height, 3 * width + 1, generator=torch.Generator().manual_seed(4))
    strides = (height * matrix.shape[1], width, matrix.shape[1], 1)
    found, expected = torch.zeros_like(matrix), torch.zeros_like(matrix)
    views = [whole.as_strided((2, 3, height, width), strides) for whole in (matrix, found, expected)]
    cpu.dct_tiles(views[0], views[1], inverse)
    reference.dct_tiles(views[0], views[2], inverse)
    assert not found[:, -1].any()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(3))
    form, threads, results = replace(FORMS["4 bits"], block_size=256), torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            after = torch.zeros(x.numel())
            results.append((*encoded(cpu, x, form, torch.float32, 5, ResidualBuffers(after, 1.0, after)), after))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_every_implementation_has_all_operations() -> None:
    assert operations(cpu) == operations(reference)


@pytest.mark.slow
def test_without_a_compiler_plain_torch_is_used_with_a_warning(tmp_path: Path) -> None:
    program = (
        "import warnings, torch\n"
        "from deepspeed_compress.compression.kernels import for_device\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    print(for_device(torch.device('cpu')).__name__)\n"
        "print([str(one.message) for one in caught if 'plain torch' in str(one.message)])\n"
    )
    environment = {"PATH": "/nonexistent", "CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    for switch, warned in (("", True), ("torch", False)):
        run = subprocess.run(
            [sys.executable, "-c", program],
            env=environment | {SWITCH: switch},
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
        name, messages = run.stdout.splitlines()
        assert name == "deepspeed_compress.compression.kernels.reference"
        assert ("g++" in messages) == warned


@properties
@given(st.integers(0, 2**64 - 1))
def test_uniform_numbers_match_the_reference(key: int) -> None:
    assert torch.equal(cpu.uniform(100, key, CPU), reference.uniform(100, key, CPU))
