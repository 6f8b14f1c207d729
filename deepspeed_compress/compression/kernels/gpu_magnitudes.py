"""Triton functions that programs of top-k share.

A magnitude is the bits of a number without its sign.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from deepspeed_compress.compression.kernels.gpu_bits import load

SIGN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def magnitudes_at(x, left, tile: tl.constexpr):
    """Return the magnitudes of `tile` numbers from `x` on, and a mask of those within the `left` remaining ones."""
    return load(x, left, tile).to(tl.int32, bitcast=True) & SIGN, tl.arange(0, tile) < left


@triton.jit
def lowest(first, words):
    """Return the column of the lowest bit of each word, -1 if there is none, and the words without this bit."""
    # The exponent of a power of two is its logarithm.
    power = (words & -words).to(tl.uint32, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(words != 0, first + ((power >> 23) - 127), -1), words & (words - 1)


@triton.jit
def ones_in(words):
    """Return the number of ones of each word (int32)."""
    words = words.to(tl.uint32, bitcast=True)
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return ((((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def bisected(magnitudes, wanted, low, reached, high, slack):
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
def store_taken(target, column, above, ties, above_seen, ties_seen, wanted):
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
