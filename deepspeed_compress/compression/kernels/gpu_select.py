"""Triton programs that select the largest magnitudes of rows.

A magnitude is the bits of a number without its sign. In rows that fit into the registers of a program, the k-th largest
is found by bisection.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.kernels.gpu_launch import TILE, flat, power_of_two, programs, warps
from deepspeed_compress.compression.kernels.gpu_select_long import (
    SIGN,
    bisected,
    lowest,
    magnitudes_at,
    ones_in,
    store_taken,
    top_k_long,
)

_MAX_ROW = 8192
_SLOTS = tl.constexpr(4)
"""Survivors per 32 elements for which a program has registers."""
_PART = tl.constexpr(8)
"""Elements of which a program of a wide row takes the largest, for its first bound."""


def top_k_rows(rows: Tensor, k: int) -> Tensor:
    """See `reference.top_k_rows`."""
    count, width = rows.shape
    if not k <= width or not flat(rows):
        return reference.top_k_rows(rows, k)
    out = torch.empty(count, k, dtype=torch.int64, device=rows.device)
    if width > _MAX_ROW:
        top_k_long(rows, out)
        return out
    columns = power_of_two(width, 1)
    with torch.cuda.device(rows.get_device()):
        if columns < TILE:
            group = TILE // columns
            _top_k[programs(count, group)](
                rows, out, count, width, k, group=group, columns=columns, num_warps=warps(TILE)
            )
        else:
            _top_k_wide[(count,)](rows, out, width, k, columns=columns, num_warps=max(4, columns // 1024))
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
    magnitudes = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.int32, bitcast=True) & SIGN
    threshold = _by_bits(magnitudes, k)
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
def _by_bits(magnitudes, k):
    """Return the `k`-th largest of each row of `magnitudes`."""
    threshold = tl.zeros([magnitudes.shape[0]], tl.int32)
    for step in range(31):
        trial = threshold | (1 << (30 - step))
        reached = tl.sum((magnitudes >= trial[:, None]).to(tl.int32), axis=1)
        threshold = tl.where(reached >= k, trial, threshold)
    return threshold


@triton.jit(do_not_specialize=["k"])
def _top_k_wide(rows, out, width, k, columns: tl.constexpr):
    """Do the same for one row per program. `columns` is at least 2**11.

    The `k`-th largest of the maxima of parts of the row is a bound, above which there are only a few more elements than
    `k`. If no 32 neighbors have more than `_SLOTS` of these, the rest is done with these few.
    """
    row = tl.program_id(0).to(tl.int64)
    source, target, wanted = rows + row * width, out + row * k, k.to(tl.int32)
    column = tl.arange(0, columns)
    if width == columns:
        magnitudes = tl.load(source + column).to(tl.int32, bitcast=True) & SIGN
    else:
        numbers = tl.load(source + column, mask=column < width, other=0.0).to(tl.int32, bitcast=True)
        magnitudes = tl.where(column < width, numbers & SIGN, -1)
    largest = tl.max(tl.reshape(magnitudes, [_PART, columns // _PART]), axis=0)
    high, bound = tl.max(largest, axis=0), tl.zeros([], tl.int32)
    if wanted <= columns // _PART:
        low, every = tl.maximum(tl.min(largest, axis=0), 0), tl.full([], columns // _PART, tl.int32)
        bound, _ = bisected(largest, wanted, low, every, high, wanted // 8)
    marks = tl.where(magnitudes >= bound, 1 << (column & 31), 0)
    words = tl.sum(tl.reshape(marks, [columns // 32, 32]), axis=1)
    # A gather distributes the words over the threads, while the sum leaves copies in several threads.
    words = tl.gather(words, tl.arange(0, columns // 32), axis=0)
    if tl.max(ones_in(words), axis=0) <= _SLOTS:
        few, place = _marked(source, words, columns // 32)
        threshold, _ = bisected(few, wanted, bound, tl.sum((place >= 0).to(tl.int32), axis=0), high, 0)
        above, ties = few > threshold, (few == threshold) & (place >= 0)
        wanted -= tl.sum(above.to(tl.int32), axis=0)
        store_taken(target, place.to(tl.int64), above, ties, 0, 0, wanted)
    else:
        threshold, _ = bisected(magnitudes, wanted, bound, tl.full([], columns, tl.int32), high, 0)
        above_seen, ties_seen = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        wanted -= tl.sum((magnitudes > threshold).to(tl.int32), axis=0)
        for first in range(0, width, columns // 8):
            numbers, inside = magnitudes_at(source + first, width - first, columns // 8)
            above, ties = inside & (numbers > threshold), inside & (numbers == threshold)
            place = (first + tl.arange(0, columns // 8)).to(tl.int64)
            above_seen, ties_seen = store_taken(target, place, above, ties, above_seen, ties_seen, wanted)


@triton.jit
def _marked(source, words, count: tl.constexpr):
    """Return up to `_SLOTS` magnitudes per word that has the bits of their columns, and the columns, -1 if missing."""
    first = tl.arange(0, count) * 32
    one, words = lowest(first, words)
    two, words = lowest(first, words)
    three, words = lowest(first, words)
    four, words = lowest(first, words)
    place = tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), [count * _SLOTS])
    return tl.load(source + place, mask=place >= 0, other=0.0).to(tl.int32, bitcast=True) & SIGN, place
