"""Triton programs that quantize rows with known scales, and add them. Each element is read and written once.

Rows may have any length. See `gpu_bits` for launch options.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.kernels.gpu_bits import load, store
from deepspeed_compress.compression.kernels.gpu_blocks import integers, rounded
from deepspeed_compress.compression.kernels.gpu_launch import TILE, flat, programs

_INFINITY = tl.constexpr(float("inf"))


def quantize_rows(rows: Tensor, scales: Tensor, levels: int, noise: Tensor | None) -> Tensor:
    """See `reference.quantize_rows`."""
    if not _covers(rows, scales, *_given(noise)):
        return reference.quantize_rows(rows, scales, levels, noise)
    codes = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    with torch.cuda.device(rows.get_device()):
        _quantize[programs(rows.numel(), TILE)](
            rows, scales, rows if noise is None else noise, codes, rows.numel(), rows.shape[1],
            levels=levels, stochastic=noise is not None, run=_run(rows.shape[1]), tile=TILE, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return codes


def quantize_rows_between(rows: Tensor, low: Tensor, high: Tensor, levels: int, noise: Tensor | None) -> Tensor:
    """See `reference.quantize_rows_between`."""
    if not _covers(rows, *_given(noise)):
        return reference.quantize_rows_between(rows, low, high, levels, noise)
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    with torch.cuda.device(rows.get_device()):
        _quantize_between[programs(rows.numel(), TILE)](
            rows, low.contiguous(), high.contiguous(), rows if noise is None else noise, codes, rows.numel(),
            rows.shape[1],
            levels=levels, stochastic=noise is not None, run=_run(rows.shape[1]), tile=TILE, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return codes


def dequantize_rows_add(scales: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
    """See `reference.dequantize_rows_add`."""
    if not _covers(codes, out, scales):
        return reference.dequantize_rows_add(scales, codes, out, scale)
    with torch.cuda.device(out.get_device()):
        _dequantize[programs(out.numel(), TILE)](
            scales, codes, out, out.numel(), out.shape[1], scale,
            run=_run(out.shape[1]), tile=TILE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return None


def _covers(rows: Tensor, *others: Tensor) -> bool:
    """Return True if indices within two consecutive rows of `rows` fit into int32, and all tensors are contiguous."""
    return flat(rows, *others) and rows.shape[1] < 1 << 30


def _given(noise: Tensor | None) -> list[Tensor]:
    return [] if noise is None else [noise]


def _run(width: int) -> int:
    """Return the number of consecutive elements of a thread that are in one row if rows have `width` elements."""
    return math.gcd(width, 4)


@triton.jit
def _places(width, left, run: tl.constexpr, tile: tl.constexpr):
    """Return the first element of a program, the row of each `run` of its elements, and a mask of the existing ones.

    Uses only one int64 division.
    """
    first, begin = tl.program_id(0).to(tl.int64) * tile, tl.arange(0, tile // run) * run
    return first, first // width + ((first % width).to(tl.int32) + begin) // width, begin < left - first


@triton.jit
def _runs(x, left, run: tl.constexpr, tile: tl.constexpr):
    """Return `tile` elements like `load`, as runs: [`tile` // `run`, `run`]."""
    return tl.reshape(load(x, left, tile), [tile // run, run])


@triton.jit(do_not_specialize=["count"])
def _quantize(
    rows, scales, noise, codes, count, width,
    levels: tl.constexpr, stochastic: tl.constexpr, run: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    first, row, inside = _places(width, count, run, tile)
    left = count - first
    drawn = _runs(noise + first, left, run, tile) if stochastic else 0.0
    numbers = _runs(rows + first, left, run, tile)
    scale = tl.load(scales + row, mask=inside, other=1.0)[:, None]
    chosen = rounded(numbers, tl.broadcast_to(scale, numbers.shape), drawn, levels, stochastic)
    store(codes + first, tl.reshape(chosen.to(tl.int8), [tile]), left, tile)


@triton.jit(do_not_specialize=["count"])
def _quantize_between(
    rows, low, high, noise, codes, count, width,
    levels: tl.constexpr, stochastic: tl.constexpr, run: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    first, row, inside = _places(width, count, run, tile)
    left = count - first
    drawn = _runs(noise + first, left, run, tile) if stochastic else 0.0
    numbers = _runs(rows + first, left, run, tile)
    lowest, highest = tl.load(low + row, mask=inside, other=0.0), tl.load(high + row, mask=inside, other=1.0)
    # As in the reference: halve everything if the difference overflows fp32.
    factor = tl.where(tl.abs(highest - lowest) == _INFINITY, 0.5, 1.0)
    start = lowest * factor
    span = highest * factor - start
    divisor = tl.broadcast_to(tl.where(span > 0, span, 1.0)[:, None], numbers.shape)
    quotient = tl.div_rn(numbers * factor[:, None] - start[:, None], divisor) * levels
    chosen = integers(quotient, drawn, 0, levels, stochastic).to(tl.uint8)
    store(codes + first, tl.reshape(chosen, [tile]), left, tile)


@triton.jit(do_not_specialize=["count"])
def _dequantize(scales, codes, out, count, width, factor, run: tl.constexpr, tile: tl.constexpr):
    first, row, inside = _places(width, count, run, tile)
    left = count - first
    scale = (tl.load(scales + row, mask=inside, other=0.0) * factor)[:, None]
    total = _runs(out + first, left, run, tile) + scale * _runs(codes + first, left, run, tile).to(tl.float32)
    store(out + first, tl.reshape(total, [tile]), left, tile)
