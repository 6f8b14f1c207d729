"""Triton kernels with the results of `reference`, each in one pass over memory.

Results are bit-identical to those of `reference`, except for the scales of kinds "norm", "mean", "lloyd" and "eight".
These are computed from fp64 sums in another order, so they may differ in the last bit of fp32. For equal scales, codes
and residuals are bit-identical. `dct_tiles` and `hadamard_tiles` differ by rounding; all GPUs of one model round alike.

Nothing waits for the GPU, and these programs allocate only results. `reference` does the rest: rows with known scales,
bit strings, other block formats (`_covers`), keys on the device, rows of more than 8192 elements, DCT tiles larger than
64 x 64, Hadamard blocks of more than 8192 elements, and tensors that are not contiguous.
"""

import torch
import triton
from torch import Tensor

from deepspeed_compress.compression.kernels import gpu_bases, gpu_bits, gpu_messages, reference
from deepspeed_compress.compression.kernels.arguments import (
    BlockFormat,
    Keys,
    MessageTable,
    ResidualBuffers,
)
from deepspeed_compress.compression.kernels.gpu_launch import TILE, bits, flat, halves, programs
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
