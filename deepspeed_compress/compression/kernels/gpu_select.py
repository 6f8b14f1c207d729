"""Triton programs that select the largest magnitudes of rows.

A magnitude is the bits of a number without its sign. The k-th largest is found digit by digit, starting with the
highest: the numbers that match the digits found so far are counted by their next digit. Counts are integers, so the
order of their summation does not matter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.kernels.gpu_bits import load
from deepspeed_compress.compression.kernels.gpu_launch import TILE, flat, power_of_two, programs, warps

_MAX_ROW = 8192
_SHARE, _SHARE_TILE = 32768, 2048
"""Elements of a longer row per program, and the number of them that it processes at a time."""
_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Digits of the 31 bits of a magnitude: (lowest bit, number of bits)."""
_SIGN = tl.constexpr(0x7FFFFFFF)


def top_k_rows(rows: Tensor, k: int) -> Tensor:
    """See `reference.top_k_rows`."""
    count, width = rows.shape
    if not k <= width or not flat(rows):
        return reference.top_k_rows(rows, k)
    out = torch.empty(count, k, dtype=torch.int64, device=rows.device)
    if width > _MAX_ROW:
        return _top_k_long(rows, out)
    columns = power_of_two(width, 1)
    group = max(1, TILE // columns)
    with torch.cuda.device(rows.get_device()):
        _top_k[programs(count, group)](
            rows, out, count, width, k, group=group, columns=columns, num_warps=warps(group * columns)
        )
    return out


def _top_k_long(rows: Tensor, out: Tensor) -> Tensor:
    """Write `top_k_rows` of rows that are shared by many programs to `out`, in five passes over the rows."""
    (count, width), k = rows.shape, out.shape[1]
    # A single row starts at the tensor's address. A step of 0 is a multiple of 16, as 16-byte loads require.
    shares, step = -(-width // _SHARE), width if count > 1 else 0
    chosen = torch.zeros(count, 2, dtype=torch.int64, device=rows.device)
    chosen[:, 1] = k
    launch = {"each": _SHARE, "tile": _SHARE_TILE, "num_warps": 8}
    with torch.cuda.device(rows.get_device()):
        for shift, bits in _DIGITS:
            counts = torch.zeros(count, 1 << bits, dtype=torch.int64, device=rows.device)
            _count_digits[(count * shares,)](
                rows, counts, chosen, width, step, shares, shift=shift, bits=bits, **launch
            )
            _choose_digit[(count,)](counts, chosen, bits=bits, num_warps=8)
        found = torch.empty(count, shares, 2, dtype=torch.int64, device=rows.device)
        _count_taken[(count * shares,)](rows, found, chosen, width, step, shares, **launch)
        before = found.cumsum(1).sub_(found)
        _write_taken[(count * shares,)](rows, out, before, chosen, width, step, shares, k, **launch)
    return out


@triton.jit(do_not_specialize=["count", "k"])
def _top_k(rows, out, count, width, k, group: tl.constexpr, columns: tl.constexpr):
    """Write the columns of the `k` largest magnitudes of `group` rows (fp32 [`count`, `width`]) to `out` (int64).

    The rows stay in registers. `width` is at most `columns`, a power of two up to 2**13.
    """
    row = tl.program_id(0).to(tl.int64) * group + tl.arange(0, group)[:, None]
    column = tl.arange(0, columns)[None, :]
    inside = (row < count) & (column < width)
    # Padding zeros never win: they lose ties because they come last.
    magnitudes = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.int32, bitcast=True) & _SIGN
    threshold = _by_digits(tl.reshape(magnitudes, [columns]), k) if group == 1 else _by_bits(magnitudes, k)
    above = magnitudes > threshold[:, None]
    ties = magnitudes == threshold[:, None]
    wanted = (k - tl.sum(above.to(tl.int32), axis=1))[:, None]
    # One scan counts both, with ties in the upper 16 bits, since a row has at most 2**13 elements.
    seen = tl.cumsum(above.to(tl.int32) + (ties.to(tl.int32) << 16), axis=1)
    ties_seen = seen >> 16
    taken = above | (ties & (ties_seen <= wanted))
    position = (seen & 0xFFFF) + tl.minimum(ties_seen, wanted) - 1
    tl.store(out + row * k + position, (column + tl.zeros_like(magnitudes)).to(tl.int64), mask=taken & inside)


@triton.jit
def _by_digits(magnitudes, k):
    """Return the `k`-th largest of flat `magnitudes`, found by 4 digits of 8 bits: [1]."""
    prefix, wanted = tl.zeros([], tl.int32), k.to(tl.int32)
    for step in tl.static_range(4):
        rest = magnitudes >> (24 - 8 * step)
        digit, wanted = _chosen(tl.histogram(rest & 255, 256, mask=rest >> 8 == prefix), wanted)
        prefix = (prefix << 8) | digit
    return tl.zeros([1], tl.int32) + prefix


@triton.jit
def _chosen(counts, wanted):
    """Return the digit of the `wanted`-th largest number, and its position among the numbers with that digit.

    `counts` is the number of numbers with each digit.
    """
    at_least = tl.cumsum(counts, axis=0, reverse=True)
    digit = tl.sum((at_least >= wanted).to(tl.int32), axis=0) - 1
    return digit, wanted - tl.max(tl.where(at_least < wanted, at_least, 0), axis=0)


@triton.jit
def _by_bits(magnitudes, k):
    """Return the `k`-th largest of each row of `magnitudes`. Used for rows that are shorter than a histogram."""
    threshold = tl.zeros([magnitudes.shape[0]], tl.int32)
    for step in range(31):
        trial = threshold | (1 << (30 - step))
        reached = tl.sum((magnitudes >= trial[:, None]).to(tl.int32), axis=1)
        threshold = tl.where(reached >= k, trial, threshold)
    return threshold


@triton.jit
def _count_digits(
    rows, counts, chosen, width, step, shares,
    each: tl.constexpr, shift: tl.constexpr, bits: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Add the counts of the digits from bit `shift` on to `counts` (int64 [rows, 2**`bits`]).

    `shares` programs share a row, with `each` elements per program, processed `tile` at a time. `step` is the number of
    elements between the starts of two rows. `chosen` (int64 [rows, 2]) has the digits found so far, and the position
    (from 1) of the wanted number among those with these digits.
    """
    row, digit = (tl.program_id(0) // shares).to(tl.int64), tl.arange(0, 1 << bits)
    prefix = tl.load(chosen + 2 * row).to(tl.int32)
    total = tl.zeros([1 << bits], tl.int32)
    begin = (tl.program_id(0) % shares).to(tl.int64) * each
    for first in range(begin, tl.minimum(begin + each, width), tile):
        magnitudes, inside = _magnitudes(rows + row * step + first, width - first, tile)
        rest = magnitudes >> shift
        total += tl.histogram(rest & ((1 << bits) - 1), 1 << bits, mask=inside & (rest >> bits == prefix))
    tl.atomic_add(counts + (row << bits) + digit, total.to(tl.int64), mask=total > 0, sem="relaxed")


@triton.jit
def _choose_digit(counts, chosen, bits: tl.constexpr):
    """Append the digit that `counts` determine to `chosen`."""
    place = (tl.program_id(0).to(tl.int64) << bits) + tl.arange(0, 1 << bits)
    state = chosen + 2 * tl.program_id(0)
    digit, wanted = _chosen(tl.load(counts + place), tl.load(state + 1))
    tl.store(state, (tl.load(state) << bits) | digit)
    tl.store(state + 1, wanted)


@triton.jit
def _count_taken(rows, found, chosen, width, step, shares, each: tl.constexpr, tile: tl.constexpr):
    """Count each program's elements above the threshold and equal to it, in `found` (int64 [rows, `shares`, 2])."""
    row = (tl.program_id(0) // shares).to(tl.int64)
    threshold = tl.load(chosen + 2 * row).to(tl.int32)
    above, ties = tl.zeros([tile], tl.int32), tl.zeros([tile], tl.int32)
    begin = (tl.program_id(0) % shares).to(tl.int64) * each
    for first in range(begin, tl.minimum(begin + each, width), tile):
        magnitudes, inside = _magnitudes(rows + row * step + first, width - first, tile)
        above += (inside & (magnitudes > threshold)).to(tl.int32)
        ties += (inside & (magnitudes == threshold)).to(tl.int32)
    target = found + 2 * tl.program_id(0).to(tl.int64)
    tl.store(target, tl.sum(above, axis=0).to(tl.int64))
    tl.store(target + 1, tl.sum(ties, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["k"])
def _write_taken(rows, out, before, chosen, width, step, shares, k, each: tl.constexpr, tile: tl.constexpr):
    """Write the columns of the taken elements to `out` (int64 [rows, `k`]).

    `before` is like `found`, but summed over the preceding programs of the row.
    """
    row = (tl.program_id(0) // shares).to(tl.int64)
    threshold, wanted = tl.load(chosen + 2 * row).to(tl.int32), tl.load(chosen + 2 * row + 1)
    source = before + 2 * tl.program_id(0).to(tl.int64)
    above_seen, ties_seen = tl.load(source), tl.load(source + 1)
    begin = (tl.program_id(0) % shares).to(tl.int64) * each
    for first in range(begin, tl.minimum(begin + each, width), tile):
        magnitudes, inside = _magnitudes(rows + row * step + first, width - first, tile)
        above, ties = inside & (magnitudes > threshold), inside & (magnitudes == threshold)
        # One scan counts both, as in `_top_k`.
        both = above.to(tl.int32) + (ties.to(tl.int32) << 16)
        seen, total = tl.cumsum(both, axis=0), tl.sum(both, axis=0)
        ties_up_to = ties_seen + (seen >> 16)
        position = above_seen + (seen & 0xFFFF) + tl.minimum(ties_up_to, wanted) - 1
        taken = above | (ties & (ties_up_to <= wanted))
        tl.store(out + row * k + position, first + tl.arange(0, tile), mask=taken)
        above_seen += total & 0xFFFF
        ties_seen += total >> 16


@triton.jit
def _magnitudes(x, left, tile: tl.constexpr):
    """Return the magnitudes of `tile` numbers from `x` on, and a mask of those within the `left` remaining ones."""
    return load(x, left, tile).to(tl.int32, bitcast=True) & _SIGN, tl.arange(0, tile) < left
