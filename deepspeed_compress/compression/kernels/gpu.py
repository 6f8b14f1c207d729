"""Triton implementations: the results of `reference`, in one pass over memory.

Bit for bit those of `reference`, but for the scales of kinds "norm", "mean" and "lloyd": they come from sums in fp64,
whose order differs, and so may differ in the last bit of fp32. Given the scales, codes and memory are the same bits.

Nothing waits for the GPU, and nothing is allocated but the results. What no program here covers goes to `reference`:
other forms of blocks (`_covers`), tiles larger than 64 x 64 in `dct_tiles`, bit strings of more than 16 bits a value.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import gpu_bases, gpu_bits, gpu_blocks, gpu_select, reference
from deepspeed_compress.compression.kernels.forms import BlockFormat, ResidualBuffers, scale_limit
from deepspeed_compress.compression.kernels.reference import (
    dequantize_rows_add,
    quantize_rows,
    quantize_rows_between,
)
from deepspeed_compress.compression.kernels.reference_bases import dct_matrix

__all__ = [
    "add_cast",
    "cast",
    "dct_tiles",
    "dequantize_blocks_add",
    "dequantize_blocks_sum",
    "dequantize_rows_add",
    "hadamard_tiles",
    "pack_bits",
    "pack_codes",
    "quantize_blocks",
    "quantize_rows",
    "quantize_rows_between",
    "top_k_rows",
    "top_k_sampled",
    "uniform",
    "unpack_bits",
    "unpack_codes",
]

_TILE = 2048
"""Elements of a program. With `_PER_WARP` it keeps 4 loads of 16 bytes in flight a thread."""
_PER_WARP = 512
_TOGETHER = 8
"""Messages that a program adds: their codes are in registers together."""
_LONGEST_BLOCK = 4096
_LONGEST_ROW = 8192
_SHARE, _SHARE_TILE = 32768, 4096
"""Elements of a longer row that a program takes, and of them at a time."""
_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Of the 31 bits of a magnitude: (lowest bit, bits)."""
_WARP_TILE = 1024
"""Elements of a program of one warp: 32 registers a thread."""
_DCT_TILE = 64
_WIDEST = 16


def _covers(form: BlockFormat) -> bool:
    """Whether blocks of `form` are encoded here: a power of two up to 4096 of elements, which fill whole bytes."""
    size = form.block_size
    return 8 % form.bits == 0 and size & (size - 1) == 0 and 8 // form.bits <= size <= _LONGEST_BLOCK


def uniform(count: int, key: int, device: torch.device) -> Tensor:
    """See `reference.uniform`."""
    out = torch.empty(count, dtype=torch.float32, device=device)
    with torch.cuda.device(out.get_device()):
        gpu_bits.uniform_numbers[_programs(count, _TILE)](out, count, *_halves(key), tile=_TILE, num_warps=4)
    return out


def cast(x: Tensor, out: Tensor) -> None:
    """See `reference.cast`."""
    if not _flat(x, out):
        return reference.cast(x, out)
    limit = torch.finfo(out.dtype).max
    with torch.cuda.device(x.get_device()):
        gpu_bits.cast_numbers[_programs(x.numel(), _TILE)](
            x, _bits(out), x.numel(), limit=limit, tile=_TILE, num_warps=4
        )
    return None


def add_cast(values: Tensor, out: Tensor, scale: float) -> None:
    """See `reference.add_cast`."""
    if not _flat(values, out):
        return reference.add_cast(values, out, scale)
    with torch.cuda.device(out.get_device()):
        gpu_bits.add_scaled[_programs(out.numel(), _TILE)](
            _bits(values), out, out.numel(), scale, tile=_TILE, num_warps=4, enable_fp_fusion=False
        )
    return None


def pack_bits(values: Tensor, width: int, out: Tensor) -> None:
    """See `reference.pack_bits`."""
    if not 0 < width <= _WIDEST or not _flat(values, out):
        return reference.pack_bits(values, width, out)
    with torch.cuda.device(out.get_device()):
        gpu_bits.pack[_programs(out.numel(), _TILE)](
            values, out, values.numel(), out.numel(), width=width, tile=_TILE, num_warps=4
        )
    return None


def pack_codes(codes: Tensor, width: int, out: Tensor) -> None:
    """See `reference.pack_codes`."""
    pack_bits(codes, width, out)


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """See `reference.unpack_bits`."""
    return _unpacked(packed, width, torch.empty(count, dtype=torch.int64, device=packed.device))


def unpack_codes(packed: Tensor, width: int, count: int) -> Tensor:
    """See `reference.unpack_codes`."""
    if width == 8:
        return packed[:count]
    return _unpacked(packed, width, torch.empty(count, dtype=torch.uint8, device=packed.device))


def _unpacked(packed: Tensor, width: int, out: Tensor) -> Tensor:
    if not 0 < width <= _WIDEST or not _flat(packed):
        return out.copy_(reference.unpack_bits(packed, width, out.numel()))
    with torch.cuda.device(out.get_device()):
        gpu_bits.unpack[_programs(out.numel(), _TILE)](
            packed, out, out.numel(), packed.numel(), width=width, tile=_TILE, num_warps=4
        )
    return out


def top_k_rows(rows: Tensor, k: int) -> Tensor:
    """See `reference.top_k_rows`."""
    count, width = rows.shape
    if not k <= width or not _flat(rows):
        return reference.top_k_rows(rows, k)
    out = torch.empty(count, k, dtype=torch.int64, device=rows.device)
    if width > _LONGEST_ROW:
        return _top_k_long(rows, out)
    columns = _power_of_two(width, 1)
    group = max(1, _TILE // columns)
    with torch.cuda.device(rows.get_device()):
        gpu_select.top_k[_programs(count, group)](
            rows, out, count, width, k, group=group, columns=columns, num_warps=_warps(group * columns)
        )
    return out


top_k_sampled = top_k_rows
"""The same elements; how many a sample leaves over would have to be waited for."""


def _top_k_long(rows: Tensor, out: Tensor) -> Tensor:
    """`top_k_rows` of rows that many programs share, to `out`: five passes over them."""
    (count, width), k = rows.shape, out.shape[1]
    # A single row begins where the tensor does: 0 is a multiple of 16, which loads of 16 bytes ask for.
    grid, step = (-(-width // _SHARE), count), width if count > 1 else 0
    chosen = torch.zeros(count, 2, dtype=torch.int64, device=rows.device)
    chosen[:, 1] = k
    launch = {"each": _SHARE, "tile": _SHARE_TILE, "num_warps": 8}
    with torch.cuda.device(rows.get_device()):
        for shift, bits in _DIGITS:
            counts = torch.zeros(count, 1 << bits, dtype=torch.int64, device=rows.device)
            gpu_select.count_digits[grid](rows, counts, chosen, width, step, shift=shift, bits=bits, **launch)
            gpu_select.choose_digit[(count,)](counts, chosen, bits=bits, num_warps=8)
        found = torch.empty(count, grid[0], 2, dtype=torch.int64, device=rows.device)
        gpu_select.count_taken[grid](rows, found, chosen, width, step, **launch)
        gpu_select.write_taken[grid](rows, out, found.cumsum(1).sub_(found), chosen, width, step, k, **launch)
    return out


def quantize_blocks(
    x: Tensor,
    form: BlockFormat,
    numbers: Tensor,
    codes: Tensor,
    key: int | None = None,
    memory: ResidualBuffers | None = None,
) -> None:
    """See `reference.quantize_blocks`."""
    # Without a memory its places in the launch are taken by x, which is not written then.
    before, after, decay = (memory.before, memory.after, memory.decay) if memory is not None else (x, x, 0.0)
    if not _covers(form) or not _flat(x, numbers, codes, before, after):
        return reference.quantize_blocks(x, form, numbers, codes, key, memory)
    group, tile = _group(form)
    grid = _programs(x.numel(), tile)
    with torch.cuda.device(x.get_device()):
        gpu_blocks.encode[grid](
            x, _bits(before), _bits(after), _bits(numbers), codes, x.numel(), codes.numel(), decay, *_halves(key or 0),
            kind=form.kind, levels=form.levels, bits=form.bits, block=form.block_size, group=group,
            limit=scale_limit(numbers.dtype, form.levels), after_limit=torch.finfo(after.dtype).max,
            remember=memory is not None, stochastic=key is not None, alignment=_alignment([codes]),
            num_warps=_warps(tile), enable_fp_fusion=False,
        )  # fmt: skip
    # The programs clear what they reach of the padding.
    if (rest := codes[grid[0] * tile * form.bits // 8 :]).numel():
        rest.zero_()
    return None


def dequantize_blocks_add(numbers: Tensor, codes: Tensor, form: BlockFormat, out: Tensor, scale: float) -> None:
    """See `reference.dequantize_blocks_add`."""
    dequantize_blocks_sum([(numbers, codes)], form, out, scale)


def dequantize_blocks_sum(
    messages: Sequence[tuple[Tensor, Tensor]], form: BlockFormat, out: Tensor, scale: float
) -> None:
    """See `reference.dequantize_blocks_sum`: one pass over `out` for 8 messages."""
    if not _covers(form) or not _flat(out, *(field for message in messages for field in message)):
        return reference.dequantize_blocks_sum(messages, form, out, scale)
    group, tile = _group(form)
    for begin in range(0, len(messages), _TOGETHER):
        numbers, codes = zip(*messages[begin : begin + _TOGETHER], strict=True)
        with torch.cuda.device(out.get_device()):
            gpu_blocks.decode[_programs(out.numel(), tile)](
                tuple(map(_bits, numbers)), codes, out, out.numel(), scale,
                kind=form.kind, bits=form.bits, block=form.block_size, group=group, alignment=_alignment(codes),
                num_warps=_warps(tile), enable_fp_fusion=False,
            )  # fmt: skip
    return None


def dct_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """See `reference.dct_tiles`; tiles up to 64 x 64 are done here."""
    rows, columns, height, width = tiles.shape
    if max(height, width) > _DCT_TILE:
        return reference.dct_tiles(tiles, out, inverse)
    left, right = (dct_matrix(size, tiles.device) for size in (height, width))
    with torch.cuda.device(out.get_device()):
        gpu_bases.dct[(rows * columns,)](
            tiles, out, left, right, columns, height, width, *tiles.stride()[:3], *out.stride()[:3],
            inverse=inverse, rows_up=_power_of_two(height, 16), columns_up=_power_of_two(width, 16), num_warps=4,
        )  # fmt: skip
    return None


def hadamard_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """See `reference.hadamard_tiles`; tiles of up to 8192 elements are done here."""
    rows, columns, height, width = tiles.shape
    size = height * width
    if size > _LONGEST_ROW or not _flat(tiles, out):
        return reference.hadamard_tiles(tiles, out, inverse)
    # A program of one warp exchanges elements without shared memory.
    group = max(1, _WARP_TILE // size)
    with torch.cuda.device(out.get_device()):
        gpu_bases.hadamard[_programs(rows * columns, group)](
            tiles, out, rows * columns, size**-0.5,
            size=size, group=group, num_warps=max(1, size // _WARP_TILE), enable_fp_fusion=False,
        )  # fmt: skip
    return None


def _programs(count: int, each: int) -> tuple[int]:
    return (-(-count // each),)


def _power_of_two(size: int, least: int) -> int:
    """The smallest one that is neither below `size` nor below `least`."""
    return max(least, 1 << (size - 1).bit_length())


def _warps(tile: int) -> int:
    return max(4, tile // _PER_WARP)


def _group(form: BlockFormat) -> tuple[int, int]:
    """Blocks, and elements, of a program."""
    group = max(1, _TILE // form.block_size)
    return group, group * form.block_size


def _halves(key: int) -> tuple[int, int]:
    """The low and the high 32 bits of `key` as int32: a number above that would make the program another one."""
    return _int32(key & 0xFFFFFFFF), _int32((key >> 32) & 0xFFFFFFFF)


def _int32(bits: int) -> int:
    return bits - ((bits & 0x80000000) << 1)


def _alignment(fields: Sequence[Tensor]) -> int:
    """Bytes, at most 16, that divide all addresses of `fields`."""
    return math.gcd(16, *(field.data_ptr() for field in fields))


def _flat(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _bits(x: Tensor) -> Tensor:
    """bf16 as the programs take it."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x
