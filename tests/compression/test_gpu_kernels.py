"""The Triton kernels against plain torch: on a GPU if there is one, otherwise in Triton's interpreter.

Functions named `check_...` run in another process, so they import the kernels themselves.
"""

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.kernels.arguments import FIRST, BlockFormat, Keys, ResidualBuffers
from tests.gpu.operations import COMPARISONS, FORMS
from tests.support.kernels import dequantize_blocks_add, message_of, operations, quantize_blocks
from tests.support.triton_interpreter import Runner, compiled, gpu_or_interpreter, inexact

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
SAMPLED = pytest.mark.sampled(48)

ROWS = {row.name: row for row in COMPARISONS if row.promised and not row.operation.endswith("tiles")}
"""Comparisons of which the interpreter takes seconds. Tiles are transformed by tests of their own."""
SIZES, BORDERS = (0, 1, 65, 2049, 5000), (63, 64, 2048, 4096)

OTHER_FORMS = {
    "blocks of half bytes": BlockFormat("absmax", 7, 4, 33),
    "not a power of two": BlockFormat("absmax", 7, 4, 96),
    "three levels": BlockFormat("ternary", 1, 2, 64),
    "less than one byte per block": BlockFormat("mean", 1, 1, 4),
    "long blocks": BlockFormat("absmax", 127, 8, 8192),
}
KEY = 2**63 + 0x9876543210
NUMEL = 5000


@pytest.fixture(scope="module")
def run() -> Iterator[Runner]:
    with gpu_or_interpreter() as runner:
        yield runner


def message(numel: int) -> Tensor:
    """Return values of many magnitudes, with blocks of denormal, huge, tied and non-finite ones."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp()
    for place, factor in ((1, 1e-42), (2, 1e38), (3, 1e-30), (4, 0.0), (5, -0.0)):
        x[place * 64 : place * 64 + 64] *= factor
    x[7 * 64 :: 11] = 0.5
    for place, bad in ((30, math.inf), (40, -math.inf), (70, torch.finfo(torch.float32).max)):
        x[place * 64 + 5 : place * 64 + 6] = bad
    # A NaN whose rounding as an integer would carry into the sign.
    x.view(torch.int32)[20 * 64 : 20 * 64 + 1] = 0x7FFFFFFF
    return x


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Check that all bits are equal, including the sign of zero, except for those of NaN."""
    actual, bits = actual.cpu(), {2: torch.int16, 4: torch.int32}
    if actual.is_floating_point():
        torch.testing.assert_close(actual.isnan(), expected.isnan())
        actual, expected = (x.nan_to_num(7.0, math.inf, -math.inf).view(bits[x.itemsize]) for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def outputs(numel: int, form: BlockFormat, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return uncleared tensors for numbers and codes."""
    numbers = torch.full((-(-numel // form.block_size),), 7.0, dtype=dtype, device=device)
    return numbers, torch.full((form.code_bytes(numel),), 0xFF, dtype=torch.uint8, device=device)


def difference(device: torch.device, name: str) -> str:
    """Return how a kernel differs from plain torch, or ""."""
    from deepspeed_compress.compression.kernels import gpu

    row = ROWS[name]
    sizes = (*SIZES, *row.sizes, *(BORDERS if row.large else ()))
    found = (row.differs(gpu, device, numel) for numel in sizes)
    return next(filter(None, found), "") or row.differs_if_alike(gpu, device)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", ROWS)
def test_kernels_have_the_bits_of_plain_torch(run: Runner, name: str) -> None:
    assert run(difference, name) == ""


def has_kernel(device: torch.device, form: BlockFormat) -> bool:
    """Return True if blocks of `form` are not passed on to the reference."""
    from deepspeed_compress.compression.kernels import gpu

    x, results = torch.randn(300, device=device), outputs(300, form, torch.float32, device)
    with (
        patch.object(reference, "quantize_messages") as quantize,
        patch.object(reference, "dequantize_messages") as add,
    ):
        quantize_blocks(gpu, x, form, *results)
        dequantize_blocks_add(gpu, *results, form, x, 1.0)
    assert quantize.called == add.called
    return not quantize.called


def test_only_forms_with_a_kernel_avoid_the_reference(run: Runner) -> None:
    assert all(run(has_kernel, form) for form in FORMS.values() if form not in OTHER_FORMS.values())
    assert not any(run(has_kernel, form) for form in OTHER_FORMS.values())


def check_unlike_rows(device: torch.device) -> None:
    """Check rows that differ so much from random numbers that shortcuts must be left."""
    from deepspeed_compress.compression.kernels import gpu

    rows = torch.randn(6, 4096, generator=torch.Generator().manual_seed(4096))
    rows[0, ::7] *= 1e3
    rows[1, 1000:1100] *= 1e3
    rows[2] = rows[2].sort().values
    rows[3] = rows[3].round()
    rows[4] = 0
    rows.view(torch.int32)[5] = 0x7FFFFFFF
    for k in (1, 40, 1365, 4096):
        assert_same(gpu.top_k_rows(rows.to(device), k), reference.top_k_rows(rows, k))


@pytest.mark.slow
def test_top_k_of_rows_unlike_random_numbers_matches_the_reference(run: Runner) -> None:
    run(check_unlike_rows)


def check_residual_in_place(device: torch.device, dtype: torch.dtype) -> None:
    from deepspeed_compress.compression.kernels import gpu

    x, before = torch.randn(300, device=device), torch.linspace(-1, 1, 300, device=device).to(dtype)
    after, results = torch.empty_like(before), outputs(300, FORMS["4 bits"], torch.float32, device)
    quantize_blocks(gpu, x, FORMS["4 bits"], *results, residual=ResidualBuffers(before, 1.0, after))
    quantize_blocks(gpu, x, FORMS["4 bits"], *results, residual=ResidualBuffers(before, 1.0, before))
    assert_same(before, after.cpu())


@SAMPLED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_residual_may_be_updated_in_place(run: Runner, dtype: torch.dtype) -> None:
    run(check_residual_in_place, dtype)


def check_uniform(device: torch.device, key: int) -> None:
    from deepspeed_compress.compression.kernels import gpu

    for count in (1, 2048, 5000):
        assert_same(gpu.uniform(count, key, device), reference.uniform(count, key, torch.device("cpu")))


@SAMPLED
@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, KEY])
def test_uniform_numbers_match_the_reference(run: Runner, key: int) -> None:
    run(check_uniform, key)


def check_dct(device: torch.device, rows: int, columns: int, height: int, width: int, inverse: bool) -> None:
    """Check tiles of a larger matrix, to rounding; elements outside the tiles must not change."""
    from deepspeed_compress.compression.kernels import gpu

    def tiles_of(matrix: Tensor) -> Tensor:
        inner = matrix[: rows * height, 3 : 3 + columns * width]
        return inner.unflatten(0, (rows, height)).unflatten(2, (columns, width)).transpose(1, 2)

    generator = torch.Generator().manual_seed(height)
    matrix = torch.randn(rows * height + 1, columns * width + 5, generator=generator).to(device)
    out, expected = torch.full_like(matrix, 7.0), torch.full_like(matrix, 7.0)
    gpu.dct_tiles(tiles_of(matrix), tiles_of(out), inverse)
    reference.dct_tiles(tiles_of(matrix), tiles_of(expected), inverse)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6 * float(matrix.abs().max()))


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 3, 64, 64), (1, 2, 64, 37), (2, 1, 3, 64), (1, 3, 1, 64), (1, 1, 1, 1), (1, 1, 65, 2)]
)
def test_dct_matches_the_reference_to_rounding(run: Runner, shape: tuple[int, int, int, int], inverse: bool) -> None:
    run(check_dct, *shape, inverse)


def check_hadamard(device: torch.device, count: int, height: int, width: int) -> None:
    """Check the bits against the C++ kernels, which add in the same order and are tested against the reference."""
    from deepspeed_compress.compression.kernels import cpu, gpu

    tiles = message(count * height * width).view(count, 1, height, width)
    expected, own = torch.empty_like(tiles), torch.empty_like(tiles, device=device)
    gpu.hadamard_tiles(tiles.to(device), own, False)
    cpu.hadamard_tiles(tiles, expected, False)
    assert_same(own, expected)


@SAMPLED
@pytest.mark.parametrize("shape", [(3, 32, 32), (9, 8, 16), (1, 64, 64), (5, 1, 2), (7, 1, 1), (1, 128, 128)])
def test_hadamard_matches_the_cpu_kernels(run: Runner, shape: tuple[int, int, int]) -> None:
    run(check_hadamard, *shape)


def check_names(device: torch.device) -> None:
    from deepspeed_compress.compression.kernels import gpu

    assert operations(gpu) == operations(reference)


def test_every_implementation_has_all_operations(run: Runner) -> None:
    run(check_names)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_block_kernels_neither_wait_for_the_gpu_nor_allocate() -> None:
    from deepspeed_compress.compression.kernels import gpu

    form, x, after = FORMS["4 bits"], torch.randn(NUMEL, device="cuda"), torch.zeros(NUMEL, device="cuda")
    table, out, _ = message_of(form, NUMEL, torch.empty(-(-NUMEL // form.block_size), device="cuda"))
    for warm in (False, True):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
        torch.cuda.set_sync_debug_mode("error" if warm else "default")
        try:
            residual = ResidualBuffers(after, 1.0, after)
            gpu.quantize_messages(x, FIRST, form, out, table, Keys.of_single(KEY), residual)
            gpu.dequantize_messages(out.expand(9, -1), form, table, x, FIRST, 1.0, True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not warm or torch.cuda.max_memory_allocated() == before


def start_block_kernels(form: BlockFormat, dtype: torch.dtype, residual: torch.dtype, numel: int) -> None:
    from deepspeed_compress.compression.kernels import gpu

    x, after, form = torch.zeros(numel), torch.zeros(numel, dtype=residual), replace(form, scale_dtype=dtype)
    table, out, _ = message_of(form, numel, torch.empty(-(-numel // form.block_size), dtype=dtype))
    keys = Keys.of_single(KEY) if form.kind == "absmax" else None
    gpu.quantize_messages(x, FIRST, form, out, table, keys, ResidualBuffers(after, 0.9, after))
    gpu.dequantize_messages(out.unsqueeze(0), form, table, x, FIRST, 0.5, True)


def start_other_kernels() -> None:
    from deepspeed_compress.compression.kernels import gpu

    gpu.top_k_rows(torch.zeros(3, 1024), 7)
    gpu.uniform(1024, KEY, torch.device("cpu"))
    gpu.cast(torch.zeros(1024), torch.zeros(1024, dtype=torch.bfloat16))
    gpu.add_cast(torch.zeros(1024, dtype=torch.bfloat16), torch.zeros(1024), 0.5)
    tiles = torch.zeros(1, 1, 32, 32)
    gpu.hadamard_tiles(tiles, torch.zeros_like(tiles), False)


def check_compiled_blocks(capability: int, form: BlockFormat, dtype: torch.dtype, residual: torch.dtype) -> None:
    # With an odd number of elements, only the last program may load fewer bytes at once.
    kernels = compiled(lambda: start_block_kernels(form, dtype, residual, 100_001), capability)
    assert [kernel.name for kernel in kernels] == ["_encode", "_decode"]
    for kernel in kernels:
        assert inexact(kernel.ptx) == set()
        assert "ld.global.v4.b32" in kernel.ptx


def check_other_compiled(capability: int) -> None:
    kernels = compiled(start_other_kernels, capability)
    names = ["_top_k", "uniform_numbers", "cast_numbers", "add_scaled", "_hadamard"]
    assert [kernel.name for kernel in kernels] == names
    assert set().union(*(inexact(kernel.ptx) for kernel in kernels)) == set()


@SAMPLED
@pytest.mark.parametrize(
    ("dtype", "residual"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", ["8 bits", "4 bits, blocks of 4096", "2 bits", "qsgd, 4 bits", "sign", "four levels"])
def test_compiled_block_kernels_are_exact_and_load_16_bytes(
    compiler: Runner, name: str, capability: int, dtype: torch.dtype, residual: torch.dtype
) -> None:
    compiler(check_compiled_blocks, capability, FORMS[name], dtype, residual)


@SAMPLED
@pytest.mark.parametrize("capability", [80, 90])
def test_other_compiled_kernels_are_exact(compiler: Runner, capability: int) -> None:
    compiler(check_other_compiled, capability)


@SAMPLED
@pytest.mark.parametrize(
    ("instruction", "found"),
    [
        ("div.rn.f32 %r1, %r2, %r3;", set()),
        ("cvt.rzi.s32.f32 %r1, %r2;", set()),
        ("div.full.f32 %r1, %r2, %r3;", {"div.full.f32"}),
        ("cvt.rmi.ftz.f32.f32 %r1, %r2;", {"cvt.rmi.ftz.f32.f32"}),
        ("@%p1 fma.rn.f32 %r1, %r2, %r3, %r4;", {"fma.rn.f32"}),
        ("sqrt.approx.f64 %rd1, %rd2;", {"sqrt.approx.f64"}),
    ],
)
def test_inexact_instructions_are_found(instruction: str, found: set[str]) -> None:
    assert inexact(instruction) == found
