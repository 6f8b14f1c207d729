"""Triton programs that select the largest magnitudes of rows that do not fit into the registers of a program.

A row is first reduced to the few elements above a bound that a sample gives. Then the k-th largest is found digit by
digit, starting with the highest: the numbers that match the digits found so far are counted by their next digit. Counts
are integers, so the order of their summation does not matter.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_compress.compression.kernels.gpu_bits import load

_MARKED = 32768
"""Elements of a row that a program marks."""
_TILE, _PROGRAMS = 2048, 1024
"""Elements that a program processes at a time, and the number of programs that share the rows."""
_SAMPLE = 8192
"""Largest number of elements in a sample of a long row, which is a row that fits into registers."""
_LEAST_SAMPLED = 32768
"""Number of elements from which a row is sampled."""
_SPREAD = 5
"""Standard deviations by which a bound from a sample is below the expected one."""
_DIGITS = (24, 16, 8, 0)
"""Lowest bits of the digits of a magnitude, which have 8 bits."""


def top_k_long(rows: Tensor, out: Tensor) -> None:
    """Write `top_k_rows` of rows that are shared by many programs to `out`.

    The survivors above a bound, in order, are a shorter row. All elements are searched only if the bound is bad.
    """
    (count, width), k = rows.shape, out.shape[1]
    rank, room = _sample_ranks(width, k)
    if width < _LEAST_SAMPLED or 4 * room > width:
        # The rows take the place of survivors in the launch arguments; they are not read as such.
        return _select(rows, rows, out, torch.zeros(count, dtype=torch.bool, device=rows.device), out)
    survivors, columns, total = _survivors(rows, _bounds(rows, rank), room)
    return _select(rows, survivors, columns, (total >= k) & (total <= room), out)


def _stride(width: int) -> int:
    """Return the sampling interval of a row. It is odd, since tensors often repeat after a power of two."""
    return -(-width // _SAMPLE) | 1


def _sample_ranks(width: int, k: int) -> tuple[int, int]:
    """Return the rank of the bound in a sample, and the number of elements that are rarely exceeded above it."""
    stride = _stride(width)
    rank, highest = k / stride, 0.0
    rank = math.ceil(rank + _SPREAD * math.sqrt(rank) + _SPREAD)
    highest = rank + _SPREAD * math.sqrt(rank) + _SPREAD
    return min(rank, -(-width // stride)), -(-math.ceil(highest * stride) // 16) * 16


def _bounds(rows: Tensor, rank: int) -> Tensor:
    """Return the magnitude with `rank` in a sample of each row: int32 [count]."""
    count, width = rows.shape
    bounds = torch.empty(count, dtype=torch.int32, device=rows.device)
    with torch.cuda.device(rows.get_device()):
        _sampled_bound[(count,)](rows, bounds, width, _stride(width), rank, columns=_SAMPLE, num_warps=16)
    return bounds


def _survivors(rows: Tensor, bounds: Tensor, room: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the elements from `bounds` on in order, the first `room` ones, their columns, and their number."""
    count, width = rows.shape
    shares, step = -(-width // _MARKED), width if count > 1 else 0
    words = torch.empty(count, shares * _MARKED // 32, dtype=torch.int32, device=rows.device)
    found = torch.empty(count, shares, dtype=torch.int64, device=rows.device)
    # Padding zeros never win: they lose ties because they come last.
    survivors = torch.zeros(count, room, dtype=torch.float32, device=rows.device)
    columns = torch.empty(count, room, dtype=torch.int64, device=rows.device)
    launch = {"each": _MARKED, "num_warps": 8}
    with torch.cuda.device(rows.get_device()):
        _mark[(count * shares,)](rows, words, found, bounds, width, step, shares, tile=_TILE, **launch)
        upto = found.cumsum(1)
        _gather_marked[(count * shares,)](
            rows, words, upto.sub(found), survivors, columns, width, step, shares, room, **launch
        )
    return survivors, columns, upto[:, -1]


def _select(rows: Tensor, survivors: Tensor, columns: Tensor, complete: Tensor, out: Tensor) -> None:
    """Write `top_k_rows` of `rows` to `out`, in six passes over `survivors` ([count, room]) or the rows.

    The survivors are used of rows for which they are `complete`. `columns` are their columns.
    """
    (count, width), room, k = rows.shape, survivors.shape[1], out.shape[1]
    # A single row starts at the tensor's address. A step of 0 is a multiple of 16, as 16-byte loads require.
    step, few_step = (width, room) if count > 1 else (0, 0)
    each, few_each = _share(count, width), _share(count, room)
    shares = max(-(-width // each), -(-room // few_each))
    chosen = torch.zeros(count, 2, dtype=torch.int64, device=rows.device)
    chosen[:, 1] = k
    counts = torch.zeros(len(_DIGITS), count, 256, dtype=torch.int64, device=rows.device)
    given = rows, survivors, complete, chosen, width, room, step, few_step, shares, each, few_each
    with torch.cuda.device(rows.get_device()):
        for shift, one in zip(_DIGITS, counts, strict=True):
            _count_digits[(count * shares,)](*given, one, shift, tile=_TILE, num_warps=8)
            _choose_digit[(count,)](one, chosen, num_warps=4)
        found = torch.empty(count, shares, 2, dtype=torch.int64, device=rows.device)
        _count_taken[(count * shares,)](*given, found, tile=_TILE, num_warps=8)
        before = found.cumsum(1).sub_(found)
        _write_taken[(count * shares,)](*given, columns, out, before, k, tile=_TILE, num_warps=8)


def _share(count: int, width: int) -> int:
    """Return the number of elements of a row per program. More programs would only start and end."""
    each = _TILE
    while each * _PROGRAMS < count * width:
        each *= 2
    return each


@triton.jit(do_not_specialize=["stride", "rank"])
def _sampled_bound(rows, bounds, width, stride, rank, columns: tl.constexpr):
    """Write the `rank`-th largest magnitude of every `stride`-th element of a row to `bounds`."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, columns).to(tl.int64) * stride
    numbers = tl.load(rows + row * width + column, mask=column < width, other=0.0)
    magnitudes = numbers.to(tl.int32, bitcast=True) & SIGN
    every, largest = tl.full([], columns, tl.int32), tl.max(magnitudes, axis=0)
    bound, _ = bisected(magnitudes, rank.to(tl.int32), tl.zeros([], tl.int32), every, largest, rank // 64)
    tl.store(bounds + row, bound)


@triton.jit
def _mark(rows, words, found, bounds, width, step, shares, each: tl.constexpr, tile: tl.constexpr):
    """Write one bit per element that tells if it reaches the bound of its row, and each program's number of them.

    Programs are as for `_count_digits`. `words` (int32) has 1 / 32 of the elements of all programs.
    """
    row = (tl.program_id(0) // shares).to(tl.int64)
    bound, total = tl.load(bounds + row), tl.zeros([tile // 32], tl.int32)
    target = words + tl.program_id(0).to(tl.int64) * (each // 32) + tl.arange(0, tile // 32)
    begin = (tl.program_id(0) % shares).to(tl.int64) * each
    for first in range(begin, begin + each, tile):
        magnitudes, inside = magnitudes_at(rows + row * step + first, width - first, tile)
        marks = (inside & (magnitudes >= bound)).to(tl.int32) << (tl.arange(0, tile) & 31)
        word = tl.sum(tl.reshape(marks, [tile // 32, 32]), axis=1)
        total += ones_in(word)
        tl.store(target + (first - begin) // 32, word)
    tl.store(found + tl.program_id(0), tl.sum(total, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["room"])
def _gather_marked(rows, words, before, survivors, columns, width, step, shares, room, each: tl.constexpr):
    """Write the marked elements to `survivors` and their columns to `columns` ([rows, `room`]), as far as they fit.

    `before` is like `found`, but summed over the preceding programs of the row.
    """
    row = (tl.program_id(0) // shares).to(tl.int64)
    begin = (tl.program_id(0) % shares).to(tl.int64) * each
    place = tl.arange(0, each // 32)
    first = begin + place * 32
    word = tl.load(words + tl.program_id(0).to(tl.int64) * (each // 32) + place)
    ones = ones_in(word)
    position = tl.load(before + tl.program_id(0)) + tl.cumsum(ones, axis=0) - ones
    for _ in range(tl.max(ones, axis=0)):
        column, rest = lowest(first, word)
        some = (word != 0) & (position < room)
        value = tl.load(rows + row * step + column, mask=some, other=0.0)
        tl.store(survivors + row * room + position, value, mask=some)
        tl.store(columns + row * room + position, column, mask=some)
        position, word = position + 1, rest


@triton.jit(do_not_specialize=["shift"])
def _count_digits(
    rows, few, complete, chosen, width, room, step, few_step, shares, each, few_each, counts, shift,
    tile: tl.constexpr,
):  # fmt: skip
    """Add the counts of the digits from bit `shift` on to `counts` (int64 [rows, 256]).

    `shares` programs share a row, with `each` elements per program, processed `tile` at a time. `step` is the number of
    elements between the starts of two rows. If a row is `complete`, its survivors in `few` are counted instead, of
    which there are `room`. `chosen` (int64 [rows, 2]) has the digits found so far, and the position (from 1) of the
    wanted number among those with these digits.
    """
    row, share = (tl.program_id(0) // shares).to(tl.int64), (tl.program_id(0) % shares).to(tl.int64)
    prefix = tl.load(chosen + 2 * row).to(tl.int32)
    if tl.load(complete + row):
        total = _counted(few + row * few_step, share * few_each, few_each, room, prefix, shift, tile)
    else:
        total = _counted(rows + row * step, share * each, each, width, prefix, shift, tile)
    tl.atomic_add(counts + row * 256 + tl.arange(0, 256), total.to(tl.int64), mask=total > 0, sem="relaxed")


@triton.jit
def _counted(x, begin, each, width, prefix, shift, tile: tl.constexpr):
    total = tl.zeros([256], tl.int32)
    for first in range(begin, tl.minimum(begin + each, width), tile):
        magnitudes, inside = magnitudes_at(x + first, width - first, tile)
        rest = magnitudes >> shift
        total += tl.histogram(rest & 255, 256, mask=inside & (rest >> 8 == prefix))
    return total


@triton.jit
def _choose_digit(counts, chosen):
    """Append the digit that `counts` determine to `chosen`."""
    place = tl.program_id(0).to(tl.int64) * 256 + tl.arange(0, 256)
    state = chosen + 2 * tl.program_id(0)
    digit, wanted = _chosen(tl.load(counts + place), tl.load(state + 1))
    tl.store(state, (tl.load(state) << 8) | digit)
    tl.store(state + 1, wanted)


@triton.jit
def _chosen(counts, wanted):
    """Return the digit of the `wanted`-th largest number, and its position among the numbers with that digit.

    `counts` is the number of numbers with each digit.
    """
    at_least = tl.cumsum(counts, axis=0, reverse=True)
    digit = tl.sum((at_least >= wanted).to(tl.int32), axis=0) - 1
    return digit, wanted - tl.max(tl.where(at_least < wanted, at_least, 0), axis=0)


@triton.jit
def _count_taken(
    rows, few, complete, chosen, width, room, step, few_step, shares, each, few_each, found, tile: tl.constexpr
):
    """Count each program's elements above the threshold and equal to it, in `found` (int64 [rows, `shares`, 2])."""
    row, share = (tl.program_id(0) // shares).to(tl.int64), (tl.program_id(0) % shares).to(tl.int64)
    threshold = tl.load(chosen + 2 * row).to(tl.int32)
    if tl.load(complete + row):
        above, ties = _around(few + row * few_step, share * few_each, few_each, room, threshold, tile)
    else:
        above, ties = _around(rows + row * step, share * each, each, width, threshold, tile)
    target = found + 2 * tl.program_id(0).to(tl.int64)
    tl.store(target, tl.sum(above, axis=0).to(tl.int64))
    tl.store(target + 1, tl.sum(ties, axis=0).to(tl.int64))


@triton.jit
def _around(x, begin, each, width, threshold, tile: tl.constexpr):
    above, ties = tl.zeros([tile], tl.int32), tl.zeros([tile], tl.int32)
    for first in range(begin, tl.minimum(begin + each, width), tile):
        magnitudes, inside = magnitudes_at(x + first, width - first, tile)
        above += (inside & (magnitudes > threshold)).to(tl.int32)
        ties += (inside & (magnitudes == threshold)).to(tl.int32)
    return above, ties


@triton.jit(do_not_specialize=["k"])
def _write_taken(
    rows, few, complete, chosen, width, room, step, few_step, shares, each, few_each, columns, out, before, k,
    tile: tl.constexpr,
):  # fmt: skip
    """Write the columns of the taken elements to `out` (int64 [rows, `k`]). Survivors have the columns `columns`.

    `before` is like `found`, but summed over the preceding programs of the row.
    """
    row, share = (tl.program_id(0) // shares).to(tl.int64), (tl.program_id(0) % shares).to(tl.int64)
    threshold, wanted = tl.load(chosen + 2 * row).to(tl.int32), tl.load(chosen + 2 * row + 1)
    source, target = before + 2 * tl.program_id(0).to(tl.int64), out + row * k
    above_seen, ties_seen = tl.load(source), tl.load(source + 1)
    compact = tl.load(complete + row)
    begin = share * tl.where(compact, few_each, each)
    end = tl.minimum(begin + tl.where(compact, few_each, each), tl.where(compact, room, width))
    for first in range(begin, end, tile):
        column, left = first + tl.arange(0, tile), end - first
        if compact:
            magnitudes, inside = magnitudes_at(few + row * few_step + first, left, tile)
            above, ties = inside & (magnitudes > threshold), inside & (magnitudes == threshold)
            column = tl.load(columns + row * room + column, mask=above | ties, other=0)
        else:
            magnitudes, inside = magnitudes_at(rows + row * step + first, left, tile)
            above, ties = inside & (magnitudes > threshold), inside & (magnitudes == threshold)
        above_seen, ties_seen = store_taken(target, column, above, ties, above_seen, ties_seen, wanted)


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
