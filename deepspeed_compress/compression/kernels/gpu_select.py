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
from deepspeed_compress.compression.kernels.gpu_bits import TILE, flat, load, power_of_two, programs, warps

_MAX_ROW = 8192
_SIGN = tl.constexpr(0x7FFFFFFF)
_SLOTS = tl.constexpr(4)
"""Survivors per 32 elements for which a program has registers."""
_PART = tl.constexpr(8)
"""Elements of which a program of a wide row takes the largest, for its first bound."""


def top_k_rows(rows: Tensor, k: int) -> Tensor:
    """See `reference.top_k_rows`. Rows of more than 8192 elements use the reference."""
    count, width = rows.shape
    if not k <= width <= _MAX_ROW or not flat(rows):
        return reference.top_k_rows(rows, k)
    out = torch.empty(count, k, dtype=torch.int64, device=rows.device)
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
    magnitudes = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.int32, bitcast=True) & _SIGN
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
        magnitudes = tl.load(source + column).to(tl.int32, bitcast=True) & _SIGN
    else:
        numbers = tl.load(source + column, mask=column < width, other=0.0).to(tl.int32, bitcast=True)
        magnitudes = tl.where(column < width, numbers & _SIGN, -1)
    largest = tl.max(tl.reshape(magnitudes, [_PART, columns // _PART]), axis=0)
    high, bound = tl.max(largest, axis=0), tl.zeros([], tl.int32)
    if wanted <= columns // _PART:
        low, every = tl.maximum(tl.min(largest, axis=0), 0), tl.full([], columns // _PART, tl.int32)
        bound, _ = _bisected(largest, wanted, low, every, high, wanted // 8)
    marks = tl.where(magnitudes >= bound, 1 << (column & 31), 0)
    words = tl.sum(tl.reshape(marks, [columns // 32, 32]), axis=1)
    # A gather distributes the words over the threads, while the sum leaves copies in several threads.
    words = tl.gather(words, tl.arange(0, columns // 32), axis=0)
    if tl.max(_ones_in(words), axis=0) <= _SLOTS:
        few, place = _marked(source, words, columns // 32)
        threshold, _ = _bisected(few, wanted, bound, tl.sum((place >= 0).to(tl.int32), axis=0), high, 0)
        above, ties = few > threshold, (few == threshold) & (place >= 0)
        wanted -= tl.sum(above.to(tl.int32), axis=0)
        _store_taken(target, place.to(tl.int64), above, ties, 0, 0, wanted)
    else:
        threshold, _ = _bisected(magnitudes, wanted, bound, tl.full([], columns, tl.int32), high, 0)
        above_seen, ties_seen = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
        wanted -= tl.sum((magnitudes > threshold).to(tl.int32), axis=0)
        for first in range(0, width, columns // 8):
            numbers, inside = _magnitudes_at(source + first, width - first, columns // 8)
            above, ties = inside & (numbers > threshold), inside & (numbers == threshold)
            place = (first + tl.arange(0, columns // 8)).to(tl.int64)
            above_seen, ties_seen = _store_taken(target, place, above, ties, above_seen, ties_seen, wanted)


@triton.jit
def _marked(source, words, count: tl.constexpr):
    """Return up to `_SLOTS` magnitudes per word that has the bits of their columns, and the columns, -1 if missing."""
    first = tl.arange(0, count) * 32
    one, words = _lowest(first, words)
    two, words = _lowest(first, words)
    three, words = _lowest(first, words)
    four, words = _lowest(first, words)
    place = tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), [count * _SLOTS])
    return tl.load(source + place, mask=place >= 0, other=0.0).to(tl.int32, bitcast=True) & _SIGN, place


@triton.jit
def _magnitudes_at(x, left, tile: tl.constexpr):
    """Return the magnitudes of `tile` numbers from `x` on, and a mask of those within the `left` remaining ones."""
    return load(x, left, tile).to(tl.int32, bitcast=True) & _SIGN, tl.arange(0, tile) < left


@triton.jit
def _lowest(first, words):
    """Return the column of the lowest bit of each word, -1 if there is none, and the words without this bit."""
    # The exponent of a power of two is its logarithm.
    power = (words & -words).to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(words != 0, first + ((power >> 23) - 127), -1), words & (words - 1)


@triton.jit
def _ones_in(words):
    """Return the number of ones of each word (int32)."""
    words = words.to(tl.uint32, bitcast=True)
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return ((((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _bisected(magnitudes, wanted, low, reached, high, slack):
    """Return a bound that at least `wanted` and at most `wanted` + `slack` magnitudes reach, and their number.

    If there is no such bound, return the `wanted`-th largest magnitude. It is between `low`, which `reached` magnitudes
    reach, and `high`.
    """
    while (low < high) & (reached > wanted + slack):
        trial = high - ((high - low) >> 1)
        total = tl.sum((magnitudes >= trial).to(tl.int32), axis=0)
        enough = total >= wanted
        low, reached = tl.where(enough, trial, low), tl.where(enough, total, reached)
        high = tl.where(enough, high, trial - 1)
    return low, reached


@triton.jit
def _store_taken(target, column, above, ties, above_seen, ties_seen, wanted):
    """Store the `column` of each element that is `above` the threshold or among the first `wanted` `ties` of the row.

    `above_seen` and `ties_seen` count such elements in front of these. Returns the counts including these.
    """
    # One scan counts both, with ties in the upper 16 bits, since there are at most 2**13 elements.
    both = above.to(tl.int32) + (ties.to(tl.int32) << 16)
    seen, total = tl.cumsum(both, axis=0), tl.sum(both, axis=0)
    ties_up_to = ties_seen + (seen >> 16)
    position = above_seen + (seen & 0xFFFF) + tl.minimum(ties_up_to, wanted) - 1
    tl.store(target + position, column, mask=above | (ties & (ties_up_to <= wanted)))
    return above_seen + (total & 0xFFFF), ties_seen + (total >> 16)
