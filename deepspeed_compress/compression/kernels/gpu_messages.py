"""Triton programs that encode or decode all messages of a table at once. See `gpu_bits` for launch options.

A program processes a tile of one message, whose places are a row of a table on the device. It is made when the message
layout is new.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.kernels.arguments import (
    BEGIN,
    CHANNEL,
    END,
    FIRST,
    NUMEL,
    OWNER,
    SOURCE,
    BlockFormat,
    Keys,
    MessageTable,
    ResidualBuffers,
)
from deepspeed_compress.compression.kernels.gpu_bits import TILE, as_fp32, bits, halves, load, saturated, store, warps
from deepspeed_compress.compression.kernels.gpu_blocks import accumulate, encode_tile, load_packed

_WIDTH = tl.constexpr(9)
"""Columns of a table of tiles: `SOURCE` and `FIRST` of the tile, its remaining elements, the place of its first scale
or value, the first byte of its codes, the bytes or values from there to the end of the message, the number of its first
element in the message, owner and channel."""
_TOGETHER = tl.constexpr(4)
"""Messages that a program adds at once, with all their codes in registers."""
_MAX_BLOCK = 4096
_KINDS = frozenset({"absmax", "norm", "mean", "lloyd", "eight"})
_WIDTHS = frozenset({1, 2, 3, 4, 8})


def _covers(form: BlockFormat) -> bool:
    """Return True if programs encode `form`: power-of-two sizes up to 4096 whose codes fill whole bytes."""
    size = form.block_size
    is_covered = form.kind in _KINDS and form.bits in _WIDTHS and size & (size - 1) == 0 and size <= _MAX_BLOCK
    return is_covered and size * form.bits % 8 == 0


def _tiles(table: MessageTable, size: int) -> tuple[Tensor, Tensor]:
    """Return the number of each tile of `size` elements within its message, and the row of this message."""
    counts = -(-table.rows[:, NUMEL] // size)
    row = torch.repeat_interleave(torch.arange(len(counts)), counts)
    within = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    return within, table.rows[row]


def _block_tiles(table: MessageTable, form: BlockFormat, size: int, device: torch.device) -> Tensor:
    within, rows = _tiles(table, size)
    done, itemsize = within * size, form.scale_dtype.itemsize
    number_bytes = -(-rows[:, NUMEL] // form.block_size) * itemsize
    codes = rows[:, BEGIN] + (number_bytes + 3) // 4 * 4 + done * form.bits // 8
    # A program needs no larger numbers of remaining elements and bytes, which are int32 there.
    left, room = (rows[:, NUMEL] - done).clamp(max=size), (rows[:, END] - codes).clamp(max=8 * size)
    columns = (
        *(rows[:, SOURCE] + done, rows[:, FIRST] + done, left),
        *(rows[:, BEGIN] // itemsize + done // form.block_size, codes, room, done),
        *(rows[:, OWNER], rows[:, CHANNEL]),
    )
    return torch.stack(columns, dim=1).to(device)


def _value_tiles(table: MessageTable, itemsize: int, device: torch.device) -> Tensor:
    within, rows = _tiles(table, TILE)
    done = within * TILE
    begin, nothing = rows[:, BEGIN] // itemsize + done, torch.zeros_like(done)
    columns = (
        *(rows[:, SOURCE] + done, rows[:, FIRST] + done, rows[:, NUMEL] - done, begin),
        *(nothing, rows[:, END] // itemsize - begin, done, nothing, nothing),
    )
    return torch.stack(columns, dim=1).to(device)


def _padding(table: MessageTable, form: BlockFormat, device: torch.device) -> Tensor:
    """Return the places of the unused 16-bit numbers between scales and codes."""
    blocks = -(-table.rows[:, NUMEL] // form.block_size)
    return (table.rows[:, BEGIN] // 2 + blocks)[blocks % 2 == 1].to(device)


def _alignment(table: MessageTable, at: int, x: Tensor) -> int:
    """Return the number of elements, at most 4, that divides all places of messages in `x`."""
    return math.gcd(4, table.divisors[at]) if x.data_ptr() % 16 == 0 else 1


def quantize_messages(
    x: Tensor,
    at: int,
    form: BlockFormat,
    out: Tensor,
    table: MessageTable,
    keys: Keys | None,
    residual: ResidualBuffers | None,
) -> None:
    """See `reference.quantize_messages`. Launches one program, and one more for scales of 16 bits."""
    if not _covers(form):
        return reference.quantize_messages(x, at, form, out, table, keys, residual)
    before, after, decay = (residual.before, residual.after, residual.decay) if residual is not None else (x, x, 0.0)
    group, dtype = max(1, TILE // form.block_size), form.scale_dtype
    size, device = group * form.block_size, x.device
    tiles = table.derive((device, form), partial(_block_tiles, table, form, size, device))
    state, sender = (keys.state, keys.sender) if keys is not None else (0, 0)
    if not len(tiles):
        return None
    with torch.cuda.device(x.get_device()):
        _encode[(len(tiles),)](
            x, bits(before), bits(after), bits(out.view(dtype)), out, tiles, decay, *halves(state), *halves(sender),
            at=at, kind=form.kind, levels=form.levels, bits=form.bits, block=form.block_size, group=group,
            limit=form.largest_scale, after_limit=torch.finfo(after.dtype).max,
            has_residual=residual is not None, stochastic=keys is not None, x_alignment=_alignment(table, at, x),
            alignment=math.gcd(4, out.data_ptr()), num_warps=warps(size), enable_fp_fusion=False,
        )  # fmt: skip
        if dtype.itemsize < 4:
            places = table.derive(("padding", device, form), partial(_padding, table, form, device))
            if len(places):
                out.view(torch.int16).index_fill_(0, places, 0)
    return None


def dequantize_messages(
    payloads: Tensor, form: BlockFormat, table: MessageTable, out: Tensor, at: int, scale: float, add: bool
) -> None:
    """See `reference.dequantize_messages`. Launches one program."""
    if not _covers(form):
        return reference.dequantize_messages(payloads, form, table, out, at, scale, add)
    group, dtype = max(1, TILE // form.block_size), form.scale_dtype
    size, device = group * form.block_size, out.device
    tiles = table.derive((device, form), partial(_block_tiles, table, form, size, device))
    if not len(tiles):
        return None
    flat, stride = _flat(payloads)
    with torch.cuda.device(out.get_device()):
        _decode[(len(tiles),)](
            bits(flat.view(dtype)), flat, out, tiles, len(payloads), stride, stride // dtype.itemsize, scale,
            at=at, kind=form.kind, bits=form.bits, block=form.block_size, group=group, add=add,
            x_alignment=_alignment(table, at, out), alignment=math.gcd(4, flat.data_ptr()),
            num_warps=warps(size), enable_fp_fusion=False,
        )  # fmt: skip
    return None


def _flat(payloads: Tensor) -> tuple[Tensor, int]:
    """Return the memory that the rows of `payloads` span, and the number of bytes from one row to the next."""
    count, size = payloads.shape
    span = (count - 1) * payloads.stride(0) + size if count else 0
    return payloads.as_strided((span,), (1,)), payloads.stride(0)


def cast_messages(x: Tensor, at: int, dtype: torch.dtype, out: Tensor, table: MessageTable) -> None:
    """See `reference.cast_messages`."""
    tiles = table.derive((x.device, dtype.itemsize), partial(_value_tiles, table, dtype.itemsize, x.device))
    if len(tiles):
        with torch.cuda.device(x.get_device()):
            _cast[(len(tiles),)](
                x, bits(out.view(dtype)), tiles, at=at, limit=torch.finfo(dtype).max, tile=TILE, num_warps=4
            )


def add_cast_messages(
    payloads: Tensor, dtype: torch.dtype, table: MessageTable, out: Tensor, at: int, scale: float, add: bool
) -> None:
    """See `reference.add_cast_messages`."""
    tiles = table.derive((out.device, dtype.itemsize), partial(_value_tiles, table, dtype.itemsize, out.device))
    if len(tiles):
        flat, stride = _flat(payloads)
        with torch.cuda.device(out.get_device()):
            _add[(len(tiles),)](
                bits(flat.view(dtype)), out, tiles, len(payloads), stride // dtype.itemsize, scale,
                at=at, add=add, tile=TILE, num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip


def copy_runs(x: Tensor, out: Tensor, table: MessageTable, back: bool) -> None:
    """See `reference.copy_runs`."""
    tiles = table.derive((x.device, "runs"), partial(_value_tiles, table, 1, x.device))
    if len(tiles):
        begin, end = (FIRST, SOURCE) if back else (SOURCE, FIRST)
        with torch.cuda.device(x.get_device()):
            _copy[(len(tiles),)](bits(x), bits(out), tiles, begin=begin, end=end, tile=TILE, num_warps=4)


@triton.jit
def _next_key(state, part):
    """See `arguments.next_key`; uint64."""
    state = state + part.to(tl.uint64) + 0x9E3779B97F4A7C15
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _whole(low, high):
    """Return the uint64 number of two halves, int32 with their bits."""
    return (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)


@triton.jit
def _half(number):
    return (number & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit(
    do_not_specialize=["state_low", "state_high", "sender_low", "sender_high"],
    do_not_specialize_on_alignment=["numbers", "codes"],
)
def _encode(
    x, before, after, numbers, codes, tiles, decay, state_low, state_high, sender_low, sender_high,
    at: tl.constexpr, kind: tl.constexpr, levels: tl.constexpr, bits: tl.constexpr, block: tl.constexpr,
    group: tl.constexpr, limit: tl.constexpr, after_limit: tl.constexpr, has_residual: tl.constexpr,
    stochastic: tl.constexpr, x_alignment: tl.constexpr, alignment: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of `group` blocks; see `gpu_blocks.encode_tile`."""
    row = tiles + tl.program_id(0) * _WIDTH
    x += tl.multiple_of(tl.load(row + at), x_alignment)
    first, left = tl.multiple_of(tl.load(row + 1), x_alignment), tl.load(row + 2).to(tl.int32)
    numbers += tl.load(row + 3)
    codes = tl.multiple_of(codes + tl.load(row + 4), alignment)
    room, index = tl.load(row + 5).to(tl.int32), tl.load(row + 6)
    key_low, key_high = 0, 0
    if stochastic:
        shared = _next_key(_next_key(_whole(state_low, state_high), tl.load(row + 7)), tl.load(row + 8))
        key_low, key_high = _half(_next_key(shared, _whole(sender_low, sender_high)) >> 32), _half(shared >> 32)
    if left >= group * block:
        # Same call with a constant: comparison with a multiple of 16 keeps 16-byte loads intact.
        encode_tile(
            x, before + first, after + first, numbers, codes, index, group * block, group * block * bits // 8,
            decay, key_low, key_high, kind, levels, bits, block, group, limit, after_limit, has_residual, stochastic,
        )  # fmt: skip
    else:
        encode_tile(
            x, before + first, after + first, numbers, codes, index, left, room,
            decay, key_low, key_high, kind, levels, bits, block, group, limit, after_limit, has_residual, stochastic,
        )  # fmt: skip


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["numbers", "codes"])
def _decode(
    numbers, codes, out, tiles, count, stride, number_stride, factor,
    at: tl.constexpr, kind: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, group: tl.constexpr,
    add: tl.constexpr, x_alignment: tl.constexpr, alignment: tl.constexpr,
):  # fmt: skip
    """Add `count` messages, which are `stride` bytes apart, to a tile of `group` blocks."""
    row = tiles + tl.program_id(0) * _WIDTH
    out += tl.multiple_of(tl.load(row + at), x_alignment)
    left = tl.load(row + 2).to(tl.int32)
    numbers += tl.load(row + 3)
    codes += tl.load(row + 4)
    if left >= group * block:
        _add_all(
            numbers, codes, out, group * block, count, stride, number_stride, factor,
            kind, bits, block, group, add, alignment,
        )  # fmt: skip
    else:
        _add_all(
            numbers, codes, out, left, count, stride, number_stride, factor, kind, bits, block, group, add, alignment
        )


@triton.jit
def _add_all(
    numbers, codes, out, left, count, stride, number_stride, factor,
    kind: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, group: tl.constexpr, add: tl.constexpr,
    alignment: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, group)[:, None] * block + tl.arange(0, block)[None, :]
    total = tl.zeros([group, block], tl.float32)
    if add:
        total = tl.load(out + place, mask=place < left, other=0.0)
    for _ in range(count // _TOGETHER):
        total = _add_some(
            numbers, codes, total, left, stride, number_stride, factor, kind, bits, block, group, _TOGETHER, alignment
        )
        numbers += number_stride * _TOGETHER
        codes += stride * _TOGETHER
    for _ in range(count % _TOGETHER):
        total = _add_some(
            numbers, codes, total, left, stride, number_stride, factor, kind, bits, block, group, 1, alignment
        )
        numbers += number_stride
        codes += stride
    tl.store(out + place, total, mask=place < left)


@triton.jit
def _add_some(
    numbers, codes, total, left, stride, number_stride, factor,
    kind: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, group: tl.constexpr, messages: tl.constexpr,
    alignment: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, group)
    # Issue all loads before the first shuffle, since loads cannot be moved across it.
    scales, packed = (), ()
    for message in tl.static_range(messages):
        begin = tl.multiple_of(codes + message * stride, alignment)
        packed += (load_packed(begin, left, group * block, bits),)  # type: ignore[assignment]
        scales += (tl.load(numbers + message * number_stride + row, mask=row * block < left, other=0),)  # type: ignore[assignment]
    return accumulate(total, scales, packed, factor, kind, bits, block, group)


@triton.jit
def _cast(x, out, tiles, at: tl.constexpr, limit: tl.constexpr, tile: tl.constexpr):
    """Cast a tile of `x` (fp32), and fill what is left of its message with 0."""
    row = tiles + tl.program_id(0) * _WIDTH
    values = load(x + tl.load(row + at), tl.load(row + 2), tile)
    store(out + tl.load(row + 3), saturated(values, out.dtype.element_ty, limit), tl.load(row + 5), tile)


@triton.jit(do_not_specialize=["count"])
def _add(values, out, tiles, count, stride, factor, at: tl.constexpr, add: tl.constexpr, tile: tl.constexpr):
    """Add `count` messages of `values`, which are `stride` values apart, times `factor`, to a tile of `out`."""
    row = tiles + tl.program_id(0) * _WIDTH
    target, left = out + tl.load(row + at), tl.load(row + 2)
    values += tl.load(row + 3)
    total = tl.zeros([tile], tl.float32)
    if add:
        total = load(target, left, tile)
    for _ in range(count):
        total += as_fp32(load(values, left, tile)) * factor
        values += stride
    store(target, total, left, tile)


@triton.jit
def _copy(x, out, tiles, begin: tl.constexpr, end: tl.constexpr, tile: tl.constexpr):
    row = tiles + tl.program_id(0) * _WIDTH
    left = tl.load(row + 2)
    store(out + tl.load(row + end), load(x + tl.load(row + begin), left, tile), left, tile)
