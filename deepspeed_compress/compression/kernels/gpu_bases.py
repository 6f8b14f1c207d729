"""Triton programs of orthonormal changes of basis: a tile is read once, stays in registers, and is written once.

Options of the launch: see `gpu_bits`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

__all__ = ["dct", "hadamard"]


@triton.jit(do_not_specialize=["count"])
def hadamard(tiles, out, count, factor, size: tl.constexpr, group: tl.constexpr):
    """Sylvester's matrix of `size` rows times `factor`, times each of `count` blocks, `group` of them a program.

    The operations of the C++ implementation in their order, so the same bits.
    """
    place = tl.program_id(0).to(tl.int64) * (group * size) + tl.arange(0, group * size)
    inside = place < count * size
    x = tl.load(tiles + place, mask=inside, other=0.0) * factor
    stages: tl.constexpr = size.bit_length() - 1
    for stage in tl.static_range(stages):
        x = _butterflies(x, 1 << stage)
    tl.store(out + place, x, mask=inside)


@triton.jit
def _butterflies(x, stride: tl.constexpr):
    """a + b in the place of a and a - b in that of b, for all elements a and b of the flat `x` `stride` apart."""
    pairs = tl.reshape(x, [x.numel // (2 * stride), 2, stride])
    bits = pairs.to(tl.int32, bitcast=True)
    other = (bits ^ tl.xor_sum(bits, axis=1, keep_dims=True)).to(tl.float32, bitcast=True)
    second = tl.arange(0, 2)[None, :, None] == 1
    return tl.reshape(tl.where(second, other - pairs, pairs + other), [x.numel])


@triton.jit
def dct(
    tiles, out, left, right, columns, height, width, row_step, tile_step, line, out_row_step, out_tile_step, out_line,
    inverse: tl.constexpr, rows_up: tl.constexpr, columns_up: tl.constexpr,
):  # fmt: skip
    """L X R^T of one tile X [`height`, `width`] a program; L and R are the matrices, or if `inverse` their transposes.

    `columns`: tiles side by side. Steps: elements from a row of tiles to the next, from a tile to the next beside it,
    from a line of elements to the next. Heights and widths are filled with zeros up to powers of two.
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
    """[`up`, `up`]: `entries` ([`size`, `size`]), zeros beyond."""
    k = tl.arange(0, up)
    inside = (k < size)[:, None] & (k < size)[None, :]
    matrix = tl.load(entries + k[:, None] * size + k[None, :], mask=inside, other=0.0)
    if transposed:
        matrix = tl.trans(matrix)
    return matrix
