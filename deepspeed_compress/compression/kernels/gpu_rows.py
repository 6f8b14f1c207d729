"""Triton programs that quantize rows with known scales, and add them. Each element is read and written once.

Rows may have any length. See `gpu_bits` for launch options.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

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
            levels=levels, stochastic=noise is not None, tile=TILE, num_warps=4, enable_fp_fusion=False,
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
            levels=levels, stochastic=noise is not None, tile=TILE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes


def dequantize_rows_add(scales: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
    """See `reference.dequantize_rows_add`."""
    if not _covers(codes, out, scales):
        return reference.dequantize_rows_add(scales, codes, out, scale)
    with torch.cuda.device(out.get_device()):
        _dequantize[programs(out.numel(), TILE)](
            scales, codes, out, out.numel(), out.shape[1], scale,
            tile=TILE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return None


def _covers(rows: Tensor, *others: Tensor) -> bool:
    """Return True if indices within two consecutive rows of `rows` fit into int32, and all tensors are contiguous."""
    return flat(rows, *others) and rows.shape[1] < 1 << 30


def _given(noise: Tensor | None) -> list[Tensor]:
    return [] if noise is None else [noise]


@triton.jit
def _places(width, tile: tl.constexpr):
    """Return the first element of a program and the row of each of its elements, with only one int64 division."""
    first = tl.program_id(0).to(tl.int64) * tile
    return first, first // width + ((first % width).to(tl.int32) + tl.arange(0, tile)) // width


@triton.jit(do_not_specialize=["count"])
def _quantize(
    rows, scales, noise, codes, count, width,
    levels: tl.constexpr, stochastic: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    first, row = _places(width, tile)
    left = count - first
    drawn = load(noise + first, left, tile) if stochastic else 0.0
    scale = tl.load(scales + row, mask=tl.arange(0, tile) < left, other=1.0)
    chosen = rounded(load(rows + first, left, tile), scale, drawn, levels, stochastic)
    store(codes + first, chosen.to(tl.int8), left, tile)


@triton.jit(do_not_specialize=["count"])
def _quantize_between(
    rows, low, high, noise, codes, count, width,
    levels: tl.constexpr, stochastic: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    first, row = _places(width, tile)
    left = count - first
    drawn = load(noise + first, left, tile) if stochastic else 0.0
    inside = tl.arange(0, tile) < left
    lowest, highest = tl.load(low + row, mask=inside, other=0.0), tl.load(high + row, mask=inside, other=1.0)
    # As in the reference: halve everything if the difference overflows fp32.
    factor = tl.where(tl.abs(highest - lowest) == _INFINITY, 0.5, 1.0)
    start = lowest * factor
    span = highest * factor - start
    offset = load(rows + first, left, tile) * factor - start
    quotient = tl.div_rn(offset, tl.where(span > 0, span, 1.0)) * levels
    store(codes + first, integers(quotient, drawn, 0, levels, stochastic).to(tl.uint8), left, tile)


@triton.jit(do_not_specialize=["count"])
def _dequantize(scales, codes, out, count, width, factor, tile: tl.constexpr):
    first, row = _places(width, tile)
    left = count - first
    scale = tl.load(scales + row, mask=tl.arange(0, tile) < left, other=0.0) * factor
    total = load(out + first, left, tile) + scale * load(codes + first, left, tile).to(tl.float32)
    store(out + first, total, left, tile)
