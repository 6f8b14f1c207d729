"""Launching of Triton programs, and those for numbers outside of blocks: uniform random numbers, and casts.

A tensor of bf16 is passed as int16, its bits: rounding them as integers gives the same result on every device. Programs
must be launched with `enable_fp_fusion=False`, because the reference rounds every product and every sum separately.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# Triton compiles the code after a branch that returns, so code that must not be compiled is in an else branch.
# ruff: noqa: RET505

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_compress.compression.kernels import reference

_INFINITY = tl.constexpr(float("inf"))
_BF16_NAN = tl.constexpr(0x7FC0)

TILE = 2048
"""Elements per program. With `_PER_WARP`, this keeps four 16-byte loads per thread in flight."""
_PER_WARP = 512


def programs(count: int, each: int) -> tuple[int]:
    return (-(-count // each),)


def power_of_two(size: int, least: int) -> int:
    """Return the smallest power of two that is at least `size`, or `least` if that is larger."""
    return max(least, 1 << (size - 1).bit_length())


def warps(tile: int) -> int:
    return max(4, tile // _PER_WARP)


def halves(key: int) -> list[int]:
    """Return the low and high 32 bits of `key` as int32. A larger number would make Triton compile another program."""
    return [half - ((half & 0x80000000) << 1) for half in (key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF)]


def flat(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def bits(x: Tensor) -> Tensor:
    """Return `x`, viewed as int16 if it is bf16, as the programs expect it."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def uniform(count: int, key: int | Tensor, device: torch.device) -> Tensor:
    """See `reference.uniform`."""
    if isinstance(key, Tensor):
        return reference.uniform(count, key, device)
    out = torch.empty(count, dtype=torch.float32, device=device)
    with torch.cuda.device(out.get_device()):
        uniform_numbers[programs(count, TILE)](out, count, *halves(key), tile=TILE, num_warps=4)
    return out


def cast(x: Tensor, out: Tensor) -> None:
    """See `reference.cast`."""
    if not flat(x, out):
        return reference.cast(x, out)
    limit = torch.finfo(out.dtype).max
    with torch.cuda.device(x.get_device()):
        cast_numbers[programs(x.numel(), TILE)](x, bits(out), x.numel(), limit=limit, tile=TILE, num_warps=4)
    return None


def add_cast(values: Tensor, out: Tensor, scale: float) -> None:
    """See `reference.add_cast`."""
    if not flat(values, out):
        return reference.add_cast(values, out, scale)
    with torch.cuda.device(out.get_device()):
        add_scaled[programs(out.numel(), TILE)](
            bits(values), out, out.numel(), scale, tile=TILE, num_warps=4, enable_fp_fusion=False
        )
    return None


@triton.jit
def load(x, left, tile: tl.constexpr):
    """Return `tile` elements from `x` on, with 0 for those beyond the `left` remaining ones."""
    place = tl.arange(0, tile)
    # Use no mask if none is needed, because it would split 16-byte loads.
    return tl.load(x + place) if left >= tile else tl.load(x + place, mask=place < left, other=0)


@triton.jit
def store(x, values, left, tile: tl.constexpr):
    """Store `tile` elements from `x` on, except those beyond the `left` remaining ones."""
    place = tl.arange(0, tile)
    if left >= tile:
        tl.store(x + place, values)
    else:
        tl.store(x + place, values, mask=place < left)


@triton.jit
def as_fp32(x):
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def from_fp32(x, dtype: tl.constexpr):
    """Return `x` (fp32) rounded to nearest even: to fp32, fp16, or bf16 as int16."""
    if dtype == tl.int16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, _BF16_NAN).to(tl.int16)
    else:
        return x.to(dtype)


@triton.jit
def saturated(x, dtype: tl.constexpr, limit: tl.constexpr):
    """Round like `from_fp32`, but keep finite numbers finite. `limit` is the largest number of `dtype`."""
    if dtype == tl.float32:
        return x
    else:
        bounded = tl.minimum(tl.maximum(x, -limit), limit)
        return from_fp32(tl.where(tl.abs(x) < _INFINITY, bounded, x), dtype)


@triton.jit
def mixed(index, key_low, key_high):
    """Return the `index`-th (uint32) number of `uniform`. The halves of the key are int32 with the bits of the key."""
    bits = (index + key_low.to(tl.uint32, bitcast=True)) ^ key_high.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return ((bits ^ (bits >> 16)) >> 8).to(tl.float32) * (2.0**-24)


@triton.jit(do_not_specialize=["count", "key_low", "key_high"])
def uniform_numbers(out, count, key_low, key_high, tile: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * tile
    numbers = mixed((first + tl.arange(0, tile)).to(tl.uint32), key_low, key_high)
    store(out + first, numbers, count - first, tile)


@triton.jit(do_not_specialize=["count"])
def cast_numbers(x, out, count, limit: tl.constexpr, tile: tl.constexpr):
    """Cast `x` (fp32) to `out`, `saturated`."""
    first = tl.program_id(0).to(tl.int64) * tile
    numbers = load(x + first, count - first, tile)
    store(out + first, saturated(numbers, out.dtype.element_ty, limit), count - first, tile)


@triton.jit(do_not_specialize=["count"])
def add_scaled(values, out, count, factor, tile: tl.constexpr):
    """Add `factor` * `values` to `out` (fp32)."""
    first = tl.program_id(0).to(tl.int64) * tile
    product = as_fp32(load(values + first, count - first, tile)) * factor
    store(out + first, load(out + first, count - first, tile) + product, count - first, tile)
