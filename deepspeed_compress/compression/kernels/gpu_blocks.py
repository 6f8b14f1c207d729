"""Triton programs that encode and decode blocks. One program processes some whole blocks, which stay in registers.

See `gpu_bits` for tensors of bf16 and launch options.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# Triton compiles the code after a branch that returns, so code that must not be compiled is in an else branch.
# ruff: noqa: RET505

import triton
import triton.language as tl

from deepspeed_compress.compression.kernels.arguments import LEVELS, OUTER
from deepspeed_compress.compression.kernels.gpu_bits import as_fp32, from_fp32, mixed, saturated

_OUTER = tl.constexpr(OUTER)
_MIDDLE = tl.constexpr((1 + OUTER) / 2)
"""Threshold between the inner and the outer level, in units of the scale."""
_START = tl.constexpr(LEVELS["eight"].start)
_LOW, _HIGH, _TOP = map(tl.constexpr, LEVELS["eight"].borders)
"""Thresholds between the four magnitudes of kind "eight", in units of the scale."""
_INFINITY = tl.constexpr(float("inf"))
_INTEGERS = tl.constexpr(1.5 * 2**23)
"""Number that, added to a small fp32 number, leaves the nearest integer in the low bits, with ties to even."""
_INTEGER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _fitted(scales, limit: tl.constexpr):
    """Return `scales` (fp32 or fp64, >= 0) as fp32, like `arguments.fitted` except for the rounding to 16 bits."""
    largest = tl.full(scales.shape, limit, scales.dtype)
    return tl.where((scales > largest) & (scales < _INFINITY), largest, scales).to(tl.float32)


@triton.jit
def _scales(rows, widths, limit: tl.constexpr, kind: tl.constexpr, levels: tl.constexpr):
    """Return a scale (fp32) per row of `rows` (fp32, 0 beyond their end) with `widths` elements; see `BlockFormat`."""
    magnitudes = rows.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if kind == "absmax":
        # Compared as integers, of which NaN is the largest.
        largest = tl.max(magnitudes, axis=1).to(tl.float32, bitcast=True)
        return _fitted(tl.div_rn(largest, tl.full(largest.shape, levels, tl.float32)), limit)
    elif kind == "norm":
        exact = rows.to(tl.float64)
        return _fitted(tl.sqrt(tl.sum(exact * exact, axis=1)) / levels, limit)
    else:
        total = tl.sum(magnitudes.to(tl.float32, bitcast=True).to(tl.float64), axis=1)
        if kind == "mean":
            return _fitted(total / widths, limit)
        elif kind == "eight":
            return _fitted(_eight(magnitudes.to(tl.float32, bitcast=True), total, widths), limit)
        else:
            return _fitted(_lloyd(magnitudes.to(tl.float32, bitcast=True), total, widths), limit)


@triton.jit
def _lloyd(magnitudes, total, widths):
    # The padding zeros of a row count as outer only if the scale is 0 in fp32, and then it stays 0.
    scales = total / (2 * widths)
    for _ in tl.static_range(2):
        outer = magnitudes >= (scales.to(tl.float32) * _MIDDLE)[:, None]
        outer_total = tl.sum(tl.where(outer, magnitudes, 0.0).to(tl.float64), axis=1)
        outer_count = tl.sum(outer.to(tl.int32), axis=1)
        scales = (total + (_OUTER - 1) * outer_total) / (widths + (_OUTER * _OUTER - 1) * outer_count)
    return scales


@triton.jit
def _eight(magnitudes, total, widths):
    """Fit the scales of the magnitudes 1, 3, 6 and 10."""
    places = _places(magnitudes, (total / widths * _START).to(tl.float32))
    nearest = ((places + 1) * (places + 2) >> 1).to(tl.float32)
    # Each padding zero of a row has the magnitude 1, except in a row of zeros, whose scale is 0 in any case.
    padding = magnitudes.shape[1] - widths
    squares = tl.sum(nearest * nearest, axis=1).to(tl.float64) - padding
    return tl.sum(magnitudes.to(tl.float64) * nearest.to(tl.float64), axis=1) / squares


@triton.jit
def _places(magnitudes, scales):
    """Return the index (int32) of the nearest magnitude of kind "eight", given the scales (fp32)."""
    low, high, top = (scales * _LOW)[:, None], (scales * _HIGH)[:, None], (scales * _TOP)[:, None]
    return (magnitudes >= low).to(tl.int32) + (magnitudes >= high).to(tl.int32) + (magnitudes >= top).to(tl.int32)


@triton.jit
def rounded(rows, scales, noise, levels: tl.constexpr, stochastic: tl.constexpr):
    """Return the codes (int32) of `reference.quantize_rows`, given a scale per element. `noise` is for `stochastic`."""
    return integers(tl.div_rn(rows, tl.where(scales > 0, scales, 1.0)), noise, -levels, levels, stochastic)


@triton.jit
def integers(quotient, noise, least: tl.constexpr, most: tl.constexpr, stochastic: tl.constexpr):
    """Round `quotient` (fp32) and clip it to int32 between `least` and `most`, below 2**22. NaN becomes 0."""
    quotient = tl.where(quotient == quotient, quotient, 0.0)
    if stochastic:
        bounded = tl.minimum(tl.maximum(quotient + noise, least), most)
        whole = _nearest(bounded)
        # The library's floor treats a denormal as zero.
        return whole - (whole.to(tl.float32) > bounded).to(tl.int32)
    else:
        return _nearest(tl.minimum(tl.maximum(quotient, least), most))


@triton.jit
def _nearest(x):
    return (x + _INTEGERS).to(tl.int32, bitcast=True) - _INTEGER_BITS


@triton.jit
def _signed(codes, kind: tl.constexpr, bits: tl.constexpr):
    """Return the values of `codes` (int32, upper bits 0) in units of the scale, as int32."""
    if kind == "mean":
        return codes * 2 - 1
    elif kind == "lloyd":
        return ((codes & 1) * (_OUTER - 1) + 1) * ((codes & 2) - 1)
    elif kind == "eight":
        return (((codes & 3) + 1) * ((codes & 3) + 2) >> 1) * ((codes >> 1 & 2) - 1)
    else:
        return (codes << (32 - bits)) >> (32 - bits)


@triton.jit
def encode_tile(
    x, before, after, numbers, codes, index, left, room, decay, key_low, key_high,
    kind: tl.constexpr, levels: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, group: tl.constexpr,
    limit: tl.constexpr, after_limit: tl.constexpr, has_residual: tl.constexpr, stochastic: tl.constexpr,
):  # fmt: skip
    """Encode `group` blocks, given `left` remaining elements and `room` bytes for codes.

    Pointers are those of the first block. `index` numbers its first element in the message.
    """
    row = tl.arange(0, group)
    place = row[:, None] * block + tl.arange(0, block)[None, :]
    inside = place < left
    message = tl.load(x + place, mask=inside, other=0.0)
    if has_residual:
        message += as_fp32(tl.load(before + place, mask=inside, other=0)) * decay

    widths = tl.minimum(tl.maximum(left - row * block, 1), block).to(tl.float64)
    stored = from_fp32(_scales(message, widths, limit, kind, levels), numbers.dtype.element_ty)
    tl.store(numbers + row, stored, mask=row * block < left)
    scales = as_fp32(stored)

    values = _codes(message, scales, (index + place).to(tl.uint32), key_low, key_high, kind, levels, stochastic)
    values = tl.where(inside, values & ((1 << bits) - 1), 0)
    _store_packed(values, place, codes, room, bits)
    if has_residual:
        # Not a product with -scales: Triton before 3.9 computes 0 - 0, so -0.0 would not be kept.
        rest = message - scales[:, None] * _signed(values, kind, bits).to(tl.float32)
        tl.store(after + place, saturated(rest, after.dtype.element_ty, after_limit), mask=inside)


@triton.jit
def _codes(rows, scales, index, key_low, key_high, kind: tl.constexpr, levels: tl.constexpr, stochastic: tl.constexpr):
    """Return codes (int32) of `rows`, of which only the lower bits are used. `index` (uint32) numbers the elements."""
    if kind == "mean":
        return (rows >= 0).to(tl.int32)
    elif kind == "lloyd":
        return (rows >= 0).to(tl.int32) * 2 + (tl.abs(rows) >= (scales * _MIDDLE)[:, None]).to(tl.int32)
    elif kind == "eight":
        return (rows >= 0).to(tl.int32) * 4 + _places(tl.abs(rows), scales)
    else:
        noise = mixed(index, key_low, key_high) if stochastic else 0.0
        return rounded(rows, tl.broadcast_to(scales[:, None], rows.shape), noise, levels, stochastic)


@triton.jit
def _store_packed(values, place, out, size, bits: tl.constexpr):
    """Store `values` (below 2**`bits`, 0 beyond the end), in the order of `place`, to the `size` bytes at `out`."""
    # Codes that do not divide a byte fill as many bytes as they have bits, eight at a time.
    codes: tl.constexpr = 8 // bits if 8 % bits == 0 else 8
    width: tl.constexpr = codes * bits // 8
    count: tl.constexpr = values.numel // codes
    packed = tl.sum(tl.reshape(values << (place % codes) * bits, [count, codes]), axis=1)
    for byte in tl.static_range(width):
        target = tl.arange(0, count) * width + byte
        tl.store(out + target, (packed >> 8 * byte).to(tl.uint8), mask=target < size)


@triton.jit
def load_packed(packed, left, count: tl.constexpr, bits: tl.constexpr):
    """Return the codes of `count` elements, of which `left` exist, as `_store_packed` groups them: int32 or uint8."""
    codes: tl.constexpr = 8 // bits if 8 % bits == 0 else 8
    width: tl.constexpr = codes * bits // 8
    place = tl.arange(0, count // codes) * width
    size = (left * bits + 7) // 8
    found = tl.load(packed + place, mask=place < size, other=0)
    if width > 1:
        found = found.to(tl.int32)
        for byte in tl.static_range(1, width):
            more = tl.load(packed + place + byte, mask=place + byte < size, other=0)
            found |= more.to(tl.int32) << 8 * byte
    return found


@triton.jit
def accumulate(
    total, scales, packed, factor, kind: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, group: tl.constexpr
):
    """Add `factor` times messages, given tuples of their scales and packed codes, to `total` ([`group`, `block`])."""
    together: tl.constexpr = 8 // bits if 8 % bits == 0 else 8
    for message in tl.static_range(len(packed)):
        values = packed[message].to(tl.int32)[:, None] >> (tl.arange(0, together) * bits)[None, :]
        signed = _signed(tl.reshape(values & ((1 << bits) - 1), [group, block]), kind, bits).to(tl.float32)
        total += (as_fp32(scales[message]) * factor)[:, None] * signed
    return total
