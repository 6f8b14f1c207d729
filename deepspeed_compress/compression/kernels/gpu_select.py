"""The Triton program that selects the largest magnitudes of rows."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

__all__ = ["top_k"]


@triton.jit(do_not_specialize=["count", "k"])
def top_k(rows, out, count, width, k, group: tl.constexpr, columns: tl.constexpr):
    """Columns of the `k` largest magnitudes of `group` of the rows (fp32 [`count`, `width`]) to `out` (int64).

    The rows stay in registers. The k-th largest magnitude is found bit by bit: a bit of it is 1 if at least k
    elements are not below what is known of it so far with that bit set. `width` is at most `columns`, a power of two.
    """
    row = tl.program_id(0).to(tl.int64) * group + tl.arange(0, group)[:, None]
    column = tl.arange(0, columns)[None, :]
    inside = (row < count) & (column < width)
    # Zeros at the end lose against all elements, since they come last of equals.
    bits = tl.load(rows + row * width + column, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    threshold = tl.zeros([group], tl.int32)
    for step in range(31):
        trial = threshold | (1 << (30 - step))
        reached = tl.sum((magnitudes >= trial[:, None]).to(tl.int32), axis=1)
        threshold = tl.where(reached >= k, trial, threshold)
    above = magnitudes > threshold[:, None]
    ties = magnitudes == threshold[:, None]
    wanted = (k - tl.sum(above.to(tl.int32), axis=1))[:, None]
    # One scan counts both up to a column: ties in the upper 16 bits, since a row has at most 2**13 elements.
    seen = tl.cumsum(above.to(tl.int32) + (ties.to(tl.int32) << 16), axis=1)
    ties_seen = seen >> 16
    taken = above | (ties & (ties_seen <= wanted))
    position = (seen & 0xFFFF) + tl.minimum(ties_seen, wanted) - 1
    tl.store(out + row * k + position, (column + tl.zeros_like(bits)).to(tl.int64), mask=taken & inside)
