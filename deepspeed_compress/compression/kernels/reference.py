"""Plain torch kernels, which define the results that faster kernels are tested against.

A "row" is one quantization or selection block. Everything is deterministic: the same input and key give the same bits
on every device.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_compress.compression.kernels import reference_bits, reference_kinds
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
    aligned,
)

pack_bits, unpack_bits = reference_bits.pack_bits, reference_bits.unpack_bits
pack_codes, unpack_codes = reference_bits.pack_codes, reference_bits.unpack_codes
quantize_rows = reference_kinds.quantize_rows

_MASK32 = 0xFFFFFFFF


def uniform(count: int, key: int | Tensor, device: torch.device) -> Tensor:
    """Return `count` fp32 numbers in [0, 1), the i-th of which is a pure function of (`key`, i).

    `key` has 64 bits, or is int64 [] on `device`. A counter is passed through the 32-bit integer mixer "lowbias32" (C.
    Wellons' hash prospector), so the numbers need no state and are equal on every device. The upper 24 bits become the
    mantissa.
    """
    bits = torch.arange(count, dtype=torch.int64, device=device)
    bits.add_(key & _MASK32).bitwise_and_(_MASK32)
    bits ^= (key >> 32) & _MASK32
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits ^= bits >> shift
        bits.mul_(factor).bitwise_and_(_MASK32)
    bits ^= bits >> 16
    return (bits >> 8).to(torch.float32).mul_(2.0**-24)


def cast(x: Tensor, out: Tensor) -> None:
    """Copy `x` (flat fp32) to `out` (fp32, bf16 or fp16), rounded to nearest even.

    Finite values beyond the range of `out` become its largest value. Only infinite values become infinite.
    """
    if out.dtype != x.dtype:
        largest = torch.finfo(out.dtype).max
        x = torch.where(x.isinf(), x, x.clamp(-largest, largest))
    out.copy_(x)


def add_cast(values: Tensor, out: Tensor, scale: float) -> None:
    """Add `scale` * `values` (fp32, bf16 or fp16) to `out` (flat fp32), rounding product and sum separately."""
    out.add_(values.to(torch.float32) * scale)


def square_norm(values: Tensor) -> Tensor:
    """Return the sum of squares of `values` (flat fp32, bf16 or fp16): fp64 [].

    Squares are added in fp32, so the result is infinite if their sum overflows fp32.
    """
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float32)
    return norm.to(torch.float64).square()


def dequantize_rows_add(scales: Tensor, codes: Tensor, out: Tensor, scale: float) -> None:
    """Add (scales * `scale`)[:, None] * codes to `out` (fp32 [r, b]), rounding each product and each sum separately."""
    out.add_(codes.to(torch.float32).mul_((scales * scale).unsqueeze(1)))


def top_k_rows(rows: Tensor, k: int) -> Tensor:
    """Return the columns of the `k` largest magnitudes of each row (fp32 [r, n]): int64 [r, k], ascending.

    NaN is larger than everything; among equal magnitudes, the lower column wins. The k largest elements lie in the k
    groups with the largest maxima, so most elements are only compared within their group.
    """
    # The bits without the sign are in the order of the magnitudes, with NaN above infinity.
    magnitudes = rows.view(torch.int32) & 0x7FFFFFFF
    group = 1 << max(0, round(math.log2(rows.shape[1] / k) / 2))
    # Padding zeros never win: they lose ties because they come last.
    magnitudes = F.pad(magnitudes, (0, -rows.shape[1] % group))
    maxima = magnitudes.view(len(rows), magnitudes.shape[1] // group, group).amax(dim=2)
    every_group = torch.arange(maxima.shape[1], device=rows.device).expand_as(maxima)
    groups = _largest(maxima, every_group, min(k, maxima.shape[1]))
    columns = (groups.unsqueeze(2) * group + torch.arange(group, device=rows.device)).flatten(1)
    return _largest(magnitudes.gather(1, columns), columns, k).sort(dim=1).values


def top_k_rows_of_sum(rows: Tensor, k: int, residual: ResidualBuffers) -> tuple[Tensor, Tensor]:
    """Return `top_k_rows` of `rows` plus the decayed residual, and the values there.

    The sum is rows + decay * before, with product and sum rounded separately. It is stored in `after`, where it is
    finite if the fp32 value is.

    Returns:
        Columns, int64 [r, k], and the sum at these columns, fp32 [r, k].
    """
    total = rows.clone()
    add_cast(residual.before, total.view(-1), residual.decay)
    columns = top_k_rows(total, k)
    cast(total.view(-1), residual.after)
    return columns, total.gather(1, columns)


def _largest(magnitudes: Tensor, columns: Tensor, k: int) -> Tensor:
    """Return the `columns` (int64 [r, c]) with the `k` largest `magnitudes` (int32 [r, c]): int64 [r, k].

    Among equal magnitudes, the lower column wins on every device; plain `topk` leaves that open.
    """
    ranks = magnitudes.to(torch.int64).mul_(1 << 32).sub_(columns)
    return columns.gather(1, ranks.topk(k, dim=1, sorted=False).indices)


def quantize_rows_between(rows: Tensor, low: Tensor, high: Tensor, levels: int, noise: Tensor | None) -> Tensor:
    """Return (`rows` - low) / (high - low) * levels, rounded and clipped to 0..levels: uint8 [r, b]; 0 if high = low.

    `rows`: fp32 [r, b]; `low`, `high`: fp32 [r]; `noise` as in `quantize_rows`.
    """
    # Halve everything if the difference overflows fp32. Elsewhere, that could cost denormals their last bit.
    factor = 1 - 0.5 * (high - low).isinf().to(rows.dtype).unsqueeze(1)
    start = low.unsqueeze(1) * factor
    span = high.unsqueeze(1) * factor - start
    quotient = (rows * factor - start) / torch.where(span > 0, span, torch.ones_like(span)) * levels
    quotient = quotient.round_() if noise is None else quotient.add_(noise).floor_()
    return quotient.clamp_(0, levels).nan_to_num_(0.0).to(torch.uint8)


def _quantize_blocks(
    x: Tensor, form: BlockFormat, numbers: Tensor, codes: Tensor, key: int | None, residual: ResidualBuffers | None
) -> None:
    """Quantize the blocks of `x`.

    Codes are rounded to nearest even or, with a `key`, stochastically: element i uses the i-th number of `uniform`.

    Args:
        x: flat fp32 [n]; not changed.
        form: format of the blocks.
        numbers: output for the scales, fp32, bf16 or fp16 [blocks].
        codes: output for the packed codes, uint8. Unused bytes become 0.
        key: key of stochastic rounding.
        residual: error-feedback buffers. x + decay * before is encoded, and the quantization error is stored in
            `after` (finite if the fp32 value is).
    """
    if residual is not None:
        x = x + residual.before.to(torch.float32) * residual.decay
    kind, values = reference_kinds.KINDS[form.kind], torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    noise = uniform(x.numel(), key, x.device) if key is not None else None
    for blocks, elements, shape in _blocks(x.numel(), form.block_size):
        rows = x[elements].view(shape)
        scales = kind.scales(rows, form.levels, numbers.dtype)
        numbers[blocks] = scales
        row_noise = None if noise is None else noise[elements].view(shape)
        values[elements].view(shape).copy_(kind.codes(rows, scales, form.levels, row_noise).view(torch.uint8))
    _pack(values, form, codes)
    if residual is not None:
        _dequantize_blocks_add(numbers, codes, form, x, -1.0)
        cast(x, residual.after)


def _dequantize_blocks_add(numbers: Tensor, codes: Tensor, form: BlockFormat, out: Tensor, scale: float) -> None:
    """Add `scale` times the values that `_quantize_blocks` encoded to `out` (flat fp32 [n]): (s * `scale`) * code."""
    values, scales = _unpack(codes, form, out.numel()), numbers.to(torch.float32)
    for blocks, elements, shape in _blocks(out.numel(), form.block_size):
        signed = reference_kinds.KINDS[form.kind].signed(values[elements], form.bits).view(shape)
        dequantize_rows_add(scales[blocks], signed, out[elements].view(shape), scale)


def quantize_messages(
    x: Tensor,
    at: int,
    form: BlockFormat,
    out: Tensor,
    table: MessageTable,
    keys: Keys | None,
    residual: ResidualBuffers | None,
) -> None:
    """Apply `_quantize_blocks` to each message of `table`.

    Args:
        x: flat fp32, whose messages begin at column `at` of the table.
        at: column of the table.
        form: format of the messages.
        out: uint8, the messages.
        table: place of each message.
        keys: keys of stochastic rounding.
        residual: error-feedback buffers, whose messages begin at `FIRST`.
    """
    for row in table.values:
        first, numel = row[FIRST], row[NUMEL]
        numbers, codes = _fields(out[row[BEGIN] : row[END]], form, numel, clear=True)
        part = None if residual is None else residual.part(first, first + numel)
        key = None if keys is None else keys.of(row[OWNER], row[CHANNEL])
        _quantize_blocks(x[row[at] : row[at] + numel], form, numbers, codes, key, part)


def dequantize_messages(
    payloads: Tensor, form: BlockFormat, table: MessageTable, out: Tensor, at: int, scale: float, add: bool
) -> None:
    """Add `scale` times the messages of `payloads` (uint8 [n, bytes]), in order, to their elements of `out`.

    If not `add`, these elements are overwritten. They begin at column `at` of the table.
    """
    for row in table.values:
        numel = row[NUMEL]
        target = out[row[at] : row[at] + numel]
        if not add:
            target.zero_()
        for payload in payloads:
            numbers, codes = _fields(payload[row[BEGIN] : row[END]], form, numel)
            _dequantize_blocks_add(numbers, codes, form, target, scale)


def _fields(message: Tensor, form: BlockFormat, numel: int, clear: bool = False) -> tuple[Tensor, Tensor]:
    """Return the scales and the codes in a message. If `clear`, set the bytes between them to zero."""
    size = form.scale_bytes(numel)
    if clear:
        message[size : aligned(size)].zero_()
    return message[:size].view(form.scale_dtype), message[aligned(size) :]


def cast_messages(x: Tensor, at: int, dtype: torch.dtype, out: Tensor, table: MessageTable) -> None:
    """Apply `cast` to each message of `table`, and fill the rest of each with 0; see `quantize_messages`."""
    for row in table.values:
        message, used = out[row[BEGIN] : row[END]], row[NUMEL] * dtype.itemsize
        cast(x[row[at] : row[at] + row[NUMEL]], message[:used].view(dtype))
        message[used:].zero_()


def add_cast_messages(
    payloads: Tensor, dtype: torch.dtype, table: MessageTable, out: Tensor, at: int, scale: float, add: bool
) -> None:
    """Apply `add_cast` to each message; see `dequantize_messages`."""
    for row in table.values:
        target, end = out[row[at] : row[at] + row[NUMEL]], row[BEGIN] + row[NUMEL] * dtype.itemsize
        if not add:
            target.zero_()
        for payload in payloads:
            add_cast(payload[row[BEGIN] : end].view(dtype), target, scale)


def copy_runs(x: Tensor, out: Tensor, table: MessageTable, back: bool) -> None:
    """Copy the elements of each row of `table` from `SOURCE` of `x` to `FIRST` of `out`, or the other way if `back`.

    Both tensors are flat and have the same dtype.
    """
    begin, end = (FIRST, SOURCE) if back else (SOURCE, FIRST)
    for row in table.values:
        out[row[end] : row[end] + row[NUMEL]] = x[row[begin] : row[begin] + row[NUMEL]]


def hadamard_at(x: Tensor, out: Tensor, places: Tensor, size: int) -> None:
    """Apply `hadamard_tiles` to the blocks of `size` elements that begin at `places` (int64 on the CPU)."""
    width = 1 << size.bit_length() // 2
    for place in places.tolist():
        shape = (1, 1, size // width, width)
        hadamard_tiles(x[place : place + size].view(shape), out[place : place + size].view(shape), False)


def _blocks(numel: int, block_size: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Yield (blocks, their elements, shape [r, b]) for the whole blocks and for the shorter last one, if not empty."""
    whole, rest = divmod(numel, block_size)
    if whole:
        yield slice(whole), slice(whole * block_size), (whole, block_size)
    if rest:
        yield slice(whole, whole + 1), slice(whole * block_size, numel), (1, rest)


def _pack(values: Tensor, form: BlockFormat, out: Tensor) -> None:
    """Write `values` (uint8 [n]) as codes of `form` to `out`, and fill the rest with 0."""
    if form.kind != "ternary":
        return pack_codes(values, form.bits, out)
    blocks = _blocks(values.numel(), form.block_size)
    rows = [reference_bits.pack_trits(values[elements].view(shape)) for _, elements, shape in blocks]
    used = form.code_bytes(values.numel())
    torch.cat([row.view(-1) for row in rows] or [out[:0]], out=out[:used])
    out[used:].zero_()
    return None


def _unpack(codes: Tensor, form: BlockFormat, numel: int) -> Tensor:
    """Invert `_pack`: return uint8 [numel]."""
    if form.kind != "ternary":
        return unpack_codes(codes, form.bits, numel)
    values, done = codes.new_empty(numel), 0
    for _, elements, (count, width) in _blocks(numel, form.block_size):
        used = count * form.code_bytes(width)
        packed = codes[done : done + used].view(count, -1)
        values[elements] = reference_bits.unpack_trits(packed, width).reshape(-1)
        done += used
    return values


def dct_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """Write the orthonormal DCT-II of each of `tiles`, in both directions, to `out`, which must not overlap `tiles`.

    Both are fp32 [rows, columns, h, w], views with any strides whose rows are contiguous.
    """
    _change_basis(tiles, out, inverse, dct_matrix)


def hadamard_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """Write Sylvester's matrix of h * w rows, times (h * w)**-0.5, times each of `tiles` to `out`.

    Both are fp32 [rows, columns, h, w]. A tile is treated as a vector of h * w elements, where h and w are powers of
    two: H_n = H_h (x) H_w (Kronecker product).
    """
    _change_basis(tiles, out, inverse, _hadamard_matrix)


def _change_basis(tiles: Tensor, out: Tensor, inverse: bool, basis: Callable[[int, torch.device], Tensor]) -> None:
    """Compute A_h X A_w^T for all tiles X or, if `inverse`, A_h^T Y A_w for all tiles Y, with A_n orthonormal."""
    left, right = (basis(size, tiles.device) for size in tiles.shape[2:])
    if inverse:
        left, right = left.T, right.T
    out.copy_(left @ (tiles @ right.T))


@lru_cache(maxsize=1024)
def dct_matrix(size: int, device: torch.device) -> Tensor:
    """Return fp32 [size, size] with entries (k, n) of sqrt(c / size) cos(pi (2 n + 1) k / (2 size)).

    c is 1 for k = 0, else 2.
    """
    numbers = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / (2 * size) * torch.outer(numbers, 2 * numbers + 1)) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return matrix.to(device, torch.float32)


@lru_cache(maxsize=1024)
def _hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """Return fp32 [size, size] with entries (i, j) of (-1)**popcount(i & j) / sqrt(size), for `size` a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.mul_(size**-0.5).to(device, torch.float32)
