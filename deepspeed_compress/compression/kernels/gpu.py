"""Triton kernels with the results of `reference`, each in one pass over memory.

Results are bit-identical to those of `reference`, except for the scales of kinds "norm", "mean", "lloyd" and "eight".
These are computed from fp64 sums in another order, so they may differ in the last bit of fp32. For equal scales, codes
and residuals are bit-identical. `dct_tiles` and `hadamard_tiles` differ by rounding; all GPUs of one model round alike.

Nothing waits for the GPU, and these programs allocate only results. `reference` does the rest: rows with known scales,
bit strings, other block formats (`gpu_messages._covers`), keys on the device, rows of more than 8192 elements, DCT
tiles larger than 64 x 64, Hadamard blocks of more than 8192 elements, and tensors that are not contiguous.
"""

import triton
from torch import Tensor

from deepspeed_compress.compression.kernels import gpu_bases, gpu_bits, gpu_messages, reference
from deepspeed_compress.compression.kernels.arguments import ResidualBuffers
from deepspeed_compress.compression.kernels.gpu_select import top_k_rows

if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 6):
    # Triton 3.3 does not compile these kernels, and 3.5 divides with denormal numbers flushed to zero.
    raise ImportError(f"Triton {triton.__version__} is installed")

uniform, cast, add_cast = gpu_bits.uniform, gpu_bits.cast, gpu_bits.add_cast
dct_tiles, hadamard_tiles, hadamard_at = gpu_bases.dct_tiles, gpu_bases.hadamard_tiles, gpu_bases.hadamard_at
quantize_messages, dequantize_messages = gpu_messages.quantize_messages, gpu_messages.dequantize_messages
cast_messages, add_cast_messages = gpu_messages.cast_messages, gpu_messages.add_cast_messages
copy_runs = gpu_messages.copy_runs
quantize_rows, quantize_rows_between = reference.quantize_rows, reference.quantize_rows_between
dequantize_rows_add = reference.dequantize_rows_add
pack_bits, unpack_bits = reference.pack_bits, reference.unpack_bits
pack_codes, unpack_codes = reference.pack_codes, reference.unpack_codes
square_norm = reference.square_norm


def top_k_rows_of_sum(rows: Tensor, k: int, residual: ResidualBuffers) -> tuple[Tensor, Tensor]:
    """See `reference.top_k_rows_of_sum`. Uses three programs, because a row may be too long for one program."""
    total = rows.clone()
    add_cast(residual.before, total.view(-1), residual.decay)
    columns = top_k_rows(total, k)
    cast(total.view(-1), residual.after)
    return columns, total.gather(1, columns)
