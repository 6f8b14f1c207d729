"""Triton kernels with the results of `reference`, each in one pass over memory.

Results are bit-identical to those of `reference`, except for the scales of kinds "norm", "mean", "lloyd" and "eight".
These are computed from fp64 sums in another order, so they may differ in the last bit of fp32. For equal scales, codes
and residuals are bit-identical. `dct_tiles` and `hadamard_tiles` differ by rounding; all GPUs of one model round alike.

Nothing waits for the GPU, and these programs allocate only results. `reference` does the rest: rows with known scales,
bit strings, other block formats (`_covers`), keys on the device, rows of more than 8192 elements, DCT tiles larger than
64 x 64, Hadamard blocks of more than 8192 elements, and tensors that are not contiguous.
"""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from deepspeed_compress.compression.kernels import gpu_bases, gpu_bits, gpu_blocks, gpu_messages, reference
from deepspeed_compress.compression.kernels.arguments import (
    BlockFormat,
    Keys,
    MessageTable,
    ResidualBuffers,
    scale_limit,
)
from deepspeed_compress.compression.kernels.gpu_launch import TILE, alignment, bits, flat, halves, programs, warps
from deepspeed_compress.compression.kernels.gpu_select import top_k_rows

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
    # Triton 3.3 does not compile these kernels, and 3.5 divides with denormal numbers flushed to zero.
    raise ImportError(f"Triton {triton.__version__} is installed")

dct_tiles, hadamard_tiles, hadamard_at = gpu_bases.dct_tiles, gpu_bases.hadamard_tiles, gpu_bases.hadamard_at
cast_messages, add_cast_messages = gpu_messages.cast_messages, gpu_messages.add_cast_messages
copy_runs = gpu_messages.copy_runs
quantize_rows, quantize_rows_between = reference.quantize_rows, reference.quantize_rows_between
dequantize_rows_add = reference.dequantize_rows_add
pack_bits, unpack_bits = reference.pack_bits, reference.unpack_bits
pack_codes, unpack_codes = reference.pack_codes, reference.unpack_codes
square_norm = reference.square_norm
_MESSAGES_PER_PASS = 8
"""Number of messages that a program adds at once, with all their codes in registers."""
_MAX_BLOCK = 4096
_KINDS = frozenset({"absmax", "norm", "mean", "lloyd", "eight"})
_WIDTHS = frozenset({1, 2, 3, 4, 8})


def _covers(form: BlockFormat) -> bool:
    """Return True if blocks of `form` are encoded here: power-of-two sizes up to 4096 whose codes fill whole bytes."""
    size = form.block_size
    is_covered = form.kind in _KINDS and form.bits in _WIDTHS and size & (size - 1) == 0 and size <= _MAX_BLOCK
    return is_covered and size * form.bits % 8 == 0


def uniform(count: int, key: int | Tensor, device: torch.device) -> Tensor:
    """See `reference.uniform`."""
    if isinstance(key, Tensor):
        return reference.uniform(count, key, device)
    out = torch.empty(count, dtype=torch.float32, device=device)
    with torch.cuda.device(out.get_device()):
        gpu_bits.uniform_numbers[programs(count, TILE)](out, count, *halves(key), tile=TILE, num_warps=4)
    return out


def cast(x: Tensor, out: Tensor) -> None:
    """See `reference.cast`."""
    if not flat(x, out):
        return reference.cast(x, out)
    limit = torch.finfo(out.dtype).max
    with torch.cuda.device(x.get_device()):
        gpu_bits.cast_numbers[programs(x.numel(), TILE)](x, bits(out), x.numel(), limit=limit, tile=TILE, num_warps=4)
    return None


def add_cast(values: Tensor, out: Tensor, scale: float) -> None:
    """See `reference.add_cast`."""
    if not flat(values, out):
        return reference.add_cast(values, out, scale)
    with torch.cuda.device(out.get_device()):
        gpu_bits.add_scaled[programs(out.numel(), TILE)](
            bits(values), out, out.numel(), scale, tile=TILE, num_warps=4, enable_fp_fusion=False
        )
    return None


def top_k_rows_of_sum(rows: Tensor, k: int, residual: ResidualBuffers) -> tuple[Tensor, Tensor]:
    """See `reference.top_k_rows_of_sum`. Uses three programs, because a row may be too long for one program."""
    total = rows.clone()
    add_cast(residual.before, total.view(-1), residual.decay)
    columns = top_k_rows(total, k)
    cast(total.view(-1), residual.after)
    return columns, total.gather(1, columns)


def quantize_blocks(
    x: Tensor,
    form: BlockFormat,
    numbers: Tensor,
    codes: Tensor,
    key: int | None = None,
    residual: ResidualBuffers | None = None,
) -> None:
    """See `reference.quantize_blocks`."""
    # Without a residual, x takes its place in the launch arguments; it is not written then.
    before, after, decay = (residual.before, residual.after, residual.decay) if residual is not None else (x, x, 0.0)
    if not _covers(form) or not flat(x, numbers, codes, before, after):
        return reference.quantize_blocks(x, form, numbers, codes, key, residual)
    group, tile = _group(form)
    grid = programs(x.numel(), tile)
    with torch.cuda.device(x.get_device()):
        gpu_blocks.encode[grid](
            x, bits(before), bits(after), bits(numbers), codes, x.numel(), codes.numel(), decay, *halves(key or 0),
            kind=form.kind, levels=form.levels, bits=form.bits, block=form.block_size, group=group,
            limit=scale_limit(numbers.dtype, form.levels), after_limit=torch.finfo(after.dtype).max,
            has_residual=residual is not None, stochastic=key is not None, alignment=alignment([codes]),
            num_warps=warps(tile), enable_fp_fusion=False,
        )  # fmt: skip
    # The programs clear only the padding that they reach.
    if (rest := codes[grid[0] * tile * form.bits // 8 :]).numel():
        rest.zero_()
    return None


def dequantize_blocks_add(numbers: Tensor, codes: Tensor, form: BlockFormat, out: Tensor, scale: float) -> None:
    """See `reference.dequantize_blocks_add`."""
    dequantize_blocks_sum([(numbers, codes)], form, out, scale)


def dequantize_blocks_sum(
    messages: Sequence[tuple[Tensor, Tensor]], form: BlockFormat, out: Tensor, scale: float, add: bool = True
) -> None:
    """See `reference.dequantize_blocks_sum`. Makes one pass over `out` per 8 messages."""
    if not _covers(form) or not flat(out, *(field for message in messages for field in message)):
        return reference.dequantize_blocks_sum(messages, form, out, scale, add)
    if not add:
        out.zero_()
    group, tile = _group(form)
    for begin in range(0, len(messages), _MESSAGES_PER_PASS):
        numbers, codes = zip(*messages[begin : begin + _MESSAGES_PER_PASS], strict=True)
        with torch.cuda.device(out.get_device()):
            gpu_blocks.decode[programs(out.numel(), tile)](
                tuple(map(bits, numbers)), codes, out, out.numel(), scale,
                kind=form.kind, bits=form.bits, block=form.block_size, group=group, alignment=alignment(codes),
                num_warps=warps(tile), enable_fp_fusion=False,
            )  # fmt: skip
    return None


def quantize_messages(
    x: Tensor,
    at: int,
    form: BlockFormat,
    dtype: torch.dtype,
    out: Tensor,
    table: MessageTable,
    keys: Keys | None,
    residual: ResidualBuffers | None,
) -> None:
    """See `reference.quantize_messages`. Launches one program, and one more for scales of 16 bits."""
    if not _covers(form):
        return reference.quantize_messages(x, at, form, dtype, out, table, keys, residual)
    with torch.cuda.device(x.get_device()):
        return gpu_messages.quantize_messages(x, at, form, dtype, out, table, keys, residual)


def dequantize_messages(
    payloads: Tensor,
    form: BlockFormat,
    dtype: torch.dtype,
    table: MessageTable,
    out: Tensor,
    at: int,
    scale: float,
    add: bool,
) -> None:
    """See `reference.dequantize_messages`. Launches one program."""
    if not _covers(form):
        return reference.dequantize_messages(payloads, form, dtype, table, out, at, scale, add)
    with torch.cuda.device(out.get_device()):
        return gpu_messages.dequantize_messages(payloads, form, dtype, table, out, at, scale, add)


def _group(form: BlockFormat) -> tuple[int, int]:
    """Return the number of blocks and of elements per program."""
    group = max(1, TILE // form.block_size)
    return group, group * form.block_size
