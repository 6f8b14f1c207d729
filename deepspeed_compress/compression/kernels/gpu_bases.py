"""Triton programs for orthonormal changes of basis. A tile is read once, stays in registers, and is written once.

See `gpu_bits` for launch options.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.kernels.gpu_bits import flat, power_of_two, programs
from deepspeed_compress.compression.kernels.reference import dct_matrix

_WARP_TILE = 1024
"""Elements of a program with one warp: 32 registers per thread."""
_MAX_BLOCK = 8192
_DCT_TILE = 64


def dct_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """See `reference.dct_tiles`. Tiles larger than 64 x 64 use the reference."""
    rows, columns, height, width = tiles.shape
    if max(height, width) > _DCT_TILE:
        return reference.dct_tiles(tiles, out, inverse)
    left, right = (dct_matrix(size, tiles.device) for size in (height, width))
    with torch.cuda.device(out.get_device()):
        _dct[(rows * columns,)](
            tiles, out, left, right, columns, height, width, *tiles.stride()[:3], *out.stride()[:3],
            inverse=inverse, rows_up=power_of_two(height, 16), columns_up=power_of_two(width, 16), num_warps=4,
        )  # fmt: skip
    return None


def hadamard_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """See `reference.hadamard_tiles`. Tiles of more than 8192 elements use the reference."""
    rows, columns, height, width = tiles.shape
    size = height * width
    if size > _MAX_BLOCK or not flat(tiles, out):
        return reference.hadamard_tiles(tiles, out, inverse)
    # A program of one warp exchanges elements without shared memory.
    group = max(1, _WARP_TILE // size)
    with torch.cuda.device(out.get_device()):
        _hadamard[programs(rows * columns, group)](
            tiles, out, rows * columns, size**-0.5,
            size=size, group=group, num_warps=max(1, size // _WARP_TILE), enable_fp_fusion=False,
        )  # fmt: skip
    return None


def hadamard_at(x: Tensor, out: Tensor, places: Tensor, size: int) -> None:
    """See `reference.hadamard_at`; `places` is on the device. Blocks of more than 8192 elements use the reference."""
    if size > _MAX_BLOCK:
        return reference.hadamard_at(x, out, places, size)
    with torch.cuda.device(out.get_device()):
        _hadamard_at[(len(places),)](
            x, out, places, size**-0.5, size=size, num_warps=max(1, size // _WARP_TILE), enable_fp_fusion=False
        )
    return None


@triton.jit
def _hadamard_at(x, out, places, factor, size: tl.constexpr):
    place = tl.load(places + tl.program_id(0)) + tl.arange(0, size)
    tl.store(out + place, _transformed(tl.load(x + place) * factor, size))


@triton.jit
def _transformed(x, size: tl.constexpr):
    """Apply the butterflies of all strides to the blocks of `size` elements of the flat `x`."""
    stages: tl.constexpr = size.bit_length() - 1
    for stage in tl.static_range(stages):
        x = _butterflies(x, 1 << stage)
    return x


@triton.jit(do_not_specialize=["count"])
def _hadamard(tiles, out, count, factor, size: tl.constexpr, group: tl.constexpr):
    """Multiply each of `count` blocks by `factor` times Sylvester's matrix of `size` rows, `group` blocks per program.

    The operations and their order are those of the C++ implementation, so the bits are equal.
    """
    place = tl.program_id(0).to(tl.int64) * (group * size) + tl.arange(0, group * size)
    inside = place < count * size
    x = tl.load(tiles + place, mask=inside, other=0.0) * factor
    tl.store(out + place, _transformed(x, size), mask=inside)


@triton.jit
def _butterflies(x, stride: tl.constexpr):
    """Replace a by a + b and b by a - b, for all elements a and b of the flat `x` that are `stride` apart."""
    pairs = tl.reshape(x, [x.numel // (2 * stride), 2, stride])
    bits = pairs.to(tl.int32, bitcast=True)
    other = (bits ^ tl.xor_sum(bits, axis=1, keep_dims=True)).to(tl.float32, bitcast=True)
    second = tl.arange(0, 2)[None, :, None] == 1
    return tl.reshape(tl.where(second, other - pairs, pairs + other), [x.numel])


@triton.jit
def _dct(
    tiles, out, left, right, columns, height, width, row_step, tile_step, line, out_row_step, out_tile_step, out_line,
    inverse: tl.constexpr, rows_up: tl.constexpr, columns_up: tl.constexpr,
):  # fmt: skip
    """Compute L X R^T for one tile X [`height`, `width`] per program.

    L and R are the matrices or, if `inverse`, their transposes. `columns` is the number of tiles in a row of tiles.
    Steps are numbers of elements: `row_step` between rows of tiles, `tile_step` between tiles of a row, `line` between
    the lines of a tile. Heights and widths are zero-padded to powers of two.
    """
    tile = tl.program_id(0).to(tl.int64)
    row, column = tile // columns, tile % columns
    i, j = tl.arange(0, rows_up), tl.arange(0, columns_up)
    inside = (i < height)[:, None] & (j < width)[None, :]
    begin = tiles + row * row_step + column * tile_step
    x = tl.load(begin + i[:, None] * line + j[None, :], mask=inside, other=0.0)
    turned = tl.dot(x, _matrix(right, width, columns_up, not inverse), input_precision="tf32x3")
    result = tl.dot(_matrix(left, height, rows_up, inverse), turned, input_precision="tf32x3")
    target = out + row * out_row_step + column * out_tile_step
    tl.store(target + i[:, None] * out_line + j[None, :], result, mask=inside)


@triton.jit
def _matrix(entries, size, up: tl.constexpr, transposed: tl.constexpr):
    """Return `entries` ([`size`, `size`]) zero-padded to [`up`, `up`]."""
    k = tl.arange(0, up)
    inside = (k < size)[:, None] & (k < size)[None, :]
    matrix = tl.load(entries + k[:, None] * size + k[None, :], mask=inside, other=0.0)
    if transposed:
        matrix = tl.trans(matrix)
    return matrix
