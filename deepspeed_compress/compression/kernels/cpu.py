"""The operations of `reference` in C++, for contiguous CPU tensors. The library is loaded on import.

Results are bit-identical to those of `reference`, except for sums in fp64, `dct_tiles` and `hadamard_tiles`, which may
round differently. Kernels use `torch.get_num_threads` threads.
"""

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.kernels.arguments import (
    FIRST,
    SOURCE,
    BlockFormat,
    Keys,
    MessageTable,
    ResidualBuffers,
    aligned,
)
from deepspeed_compress.compression.kernels.compiled import load_library

dequantize_rows_add, quantize_rows = reference.dequantize_rows_add, reference.quantize_rows
quantize_rows_between = reference.quantize_rows_between
pack_codes, unpack_codes = reference.pack_codes, reference.unpack_codes

_POINTER, _INT, _LONG, _KEY = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double
_KINDS: Mapping[str, int] = {"absmax": 0, "norm": 1, "mean": 2, "lloyd": 3, "eight": 4, "ternary": 5}
_TYPES: Mapping[torch.dtype, int] = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
_FP32 = torch.float32
_MAX_NUMEL = 1 << 53
"""Upper bound on the number of elements of a tensor."""
_MAX_WIDTH = 56
"""Maximum width of a packed integer in bits. With up to seven bits of the previous one, it fits into 64 bits."""
_NO_RESIDUAL = (0, None, 0.0, None)
_STRIDES = ctypes.c_int64 * 3
_DCT_TILE = 64
"""Maximum side of a tile of the C++ DCT."""


def _declared(*parameters: tuple[str, list[type]]) -> ctypes.CDLL:
    library = load_library()
    for name, types in parameters:
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


_LIBRARY = _declared(
    ("compress_uniform", [_LONG, _KEY, _POINTER, _INT]),
    ("compress_cast", [_POINTER, _LONG, _POINTER, _INT, _INT]),
    ("compress_add_cast", [_POINTER, _INT, _LONG, _POINTER, _FLOAT, _INT]),
    ("compress_square_norm", [_POINTER, _INT, _LONG, _POINTER]),
    ("compress_top_k", [_POINTER, _LONG, _LONG, _LONG, _POINTER, _INT]),
    (
        "compress_top_k_of_sum",
        [_POINTER, _LONG, _LONG, _LONG, _INT, _POINTER, _FLOAT, _POINTER, _POINTER, _POINTER, _INT],
    ),
    ("compress_pack_bits", [_POINTER, _LONG, _INT, _POINTER, _LONG]),
    ("compress_unpack_bits", [_POINTER, _INT, _LONG, _POINTER]),
    ("compress_dct", [_POINTER, _STRIDES, _POINTER, _STRIDES, _LONG, _LONG, _INT, _INT, _INT, _INT]),
    ("compress_hadamard", [_POINTER, _LONG, _LONG, _POINTER, _INT]),
    ("compress_hadamard_at", [_POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT]),
    (
        "compress_quantize_messages",
        [
            *(_POINTER, _INT, _POINTER, _LONG, _INT, _INT, _INT, _LONG, _DOUBLE, _INT, _POINTER, _INT, _KEY, _KEY),
            *(_INT, _POINTER, _FLOAT, _POINTER, _INT),
        ],
    ),
    (
        "compress_dequantize_messages",
        [
            *(_POINTER, _LONG, _LONG, _POINTER, _LONG, _INT, _INT, _INT, _LONG),
            *(_POINTER, _INT, _FLOAT, _INT, _INT),
        ],
    ),
    ("compress_cast_messages", [_POINTER, _INT, _POINTER, _LONG, _INT, _POINTER, _INT]),
    (
        "compress_add_cast_messages",
        [_POINTER, _LONG, _LONG, _POINTER, _LONG, _INT, _POINTER, _INT, _FLOAT, _INT, _INT],
    ),
    ("compress_copy_runs", [_POINTER, _POINTER, _POINTER, _LONG, _LONG, _INT, _INT]),
)


def _at(tensor: Tensor, numel: int, *dtypes: torch.dtype) -> int:
    """Return the address of `numel` elements of `tensor`, after checks, because the kernels trust it.

    Raises:
        ValueError: `tensor` is too small, not contiguous, not on the CPU, or not of one of `dtypes`.
    """
    if tensor.numel() < numel or tensor.dtype not in dtypes:
        raise ValueError(f"expected {numel} elements of {' or '.join(map(str, dtypes))}, got {_describe(tensor)}")
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"expected a contiguous tensor on the CPU, got {_describe(tensor)}")
    return tensor.data_ptr()


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"


def _check_range(name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise ValueError(f"{name} {value} (allowed: {lowest} to {highest})")


def _check_form(form: BlockFormat) -> None:
    _check_range("block_size", form.block_size, 1, _MAX_NUMEL)
    _check_range("bits", form.bits, 1, 8)


def uniform(count: int, key: int | Tensor, device: torch.device) -> Tensor:
    """See `reference.uniform`."""
    _check_range("count", count, 0, _MAX_NUMEL)
    out = torch.empty(count)
    _LIBRARY.compress_uniform(count, int(key), _at(out, count, _FP32), torch.get_num_threads())
    return out


def cast(x: Tensor, out: Tensor) -> None:
    """See `reference.cast`."""
    _LIBRARY.compress_cast(
        _at(x, x.numel(), _FP32), x.numel(), _at(out, x.numel(), *_TYPES), _TYPES[out.dtype], torch.get_num_threads()
    )


def add_cast(values: Tensor, out: Tensor, scale: float) -> None:
    """See `reference.add_cast`."""
    numel = out.numel()
    _LIBRARY.compress_add_cast(
        *(_at(values, numel, *_TYPES), _TYPES[values.dtype], numel, _at(out, numel, _FP32), scale),
        torch.get_num_threads(),
    )


def square_norm(values: Tensor) -> Tensor:
    """See `reference.square_norm`. The order of summation differs."""
    out = torch.empty((), dtype=torch.float64)
    _LIBRARY.compress_square_norm(
        _at(values, values.numel(), *_TYPES), _TYPES[values.dtype], values.numel(), out.data_ptr()
    )
    return out


def _residual_arguments(residual: ResidualBuffers, numel: int) -> tuple[int, int, float, int]:
    before, dtype = _at(residual.before, numel, torch.float32, torch.bfloat16), residual.before.dtype
    return _TYPES[dtype], before, residual.decay, _at(residual.after, numel, dtype)


def quantize_messages(
    x: Tensor,
    at: int,
    form: BlockFormat,
    out: Tensor,
    table: MessageTable,
    keys: Keys | None,
    residual: ResidualBuffers | None,
) -> None:
    """See `reference.quantize_messages`."""
    _check_form(form)
    table.check_elements(at, x.numel())
    table.check_bytes(out.numel(), form, form.message_bytes)
    _LIBRARY.compress_quantize_messages(
        *(_at(x, 0, _FP32), at, table.rows.data_ptr(), len(table.rows)),
        *(_KINDS[form.kind], form.levels, form.bits, form.block_size, form.largest_scale, _TYPES[form.scale_dtype]),
        *(_at(out, 0, torch.uint8), keys is not None, *((keys.state, keys.sender) if keys else (0, 0))),
        *(_NO_RESIDUAL if residual is None else _residual_arguments(residual, table.ends[FIRST])),
        torch.get_num_threads(),
    )


def dequantize_messages(
    payloads: Tensor, form: BlockFormat, table: MessageTable, out: Tensor, at: int, scale: float, add: bool
) -> None:
    """See `reference.dequantize_messages`. Makes one pass over `out`."""
    _check_form(form)
    table.check_elements(at, out.numel())
    table.check_bytes(payloads.shape[1], form, form.message_bytes)
    _LIBRARY.compress_dequantize_messages(
        *(*_rows_at(payloads), table.rows.data_ptr(), len(table.rows), _TYPES[form.scale_dtype]),
        *(_KINDS[form.kind], form.bits, form.block_size, _at(out, 0, _FP32), at, scale, add, torch.get_num_threads()),
    )


def _rows_at(payloads: Tensor) -> tuple[int, int, int]:
    """Return the address of `payloads` (uint8 [n, bytes]), n, and the distance between its rows in bytes.

    Raises:
        ValueError: `payloads` is not uint8 on the CPU, or its rows are not contiguous.
    """
    is_bytes = payloads.dtype == torch.uint8 and payloads.device.type == "cpu" and payloads.dim() == 2
    if not is_bytes or (payloads.stride(1) != 1 and payloads.shape[1] > 1):
        raise ValueError(f"expected rows of bytes on the CPU, got {_describe(payloads)}")
    return payloads.data_ptr(), payloads.shape[0], payloads.stride(0)


def cast_messages(x: Tensor, at: int, dtype: torch.dtype, out: Tensor, table: MessageTable) -> None:
    """See `reference.cast_messages`."""
    table.check_elements(at, x.numel())
    table.check_bytes(out.numel(), dtype, lambda numel: aligned(numel * dtype.itemsize))
    _LIBRARY.compress_cast_messages(
        *(_at(x, 0, _FP32), at, table.rows.data_ptr(), len(table.rows), _TYPES[dtype], _at(out, 0, torch.uint8)),
        torch.get_num_threads(),
    )


def add_cast_messages(
    payloads: Tensor, dtype: torch.dtype, table: MessageTable, out: Tensor, at: int, scale: float, add: bool
) -> None:
    """See `reference.add_cast_messages`."""
    table.check_elements(at, out.numel())
    table.check_bytes(payloads.shape[1], dtype, lambda numel: aligned(numel * dtype.itemsize))
    _LIBRARY.compress_add_cast_messages(
        *(*_rows_at(payloads), table.rows.data_ptr(), len(table.rows), _TYPES[dtype]),
        *(_at(out, 0, _FP32), at, scale, add, torch.get_num_threads()),
    )


def copy_runs(x: Tensor, out: Tensor, table: MessageTable, back: bool) -> None:
    """See `reference.copy_runs`."""
    begin, end = (FIRST, SOURCE) if back else (SOURCE, FIRST)
    table.check_elements(begin, x.numel())
    table.check_elements(end, out.numel())
    _LIBRARY.compress_copy_runs(
        *(_at(x, 0, *_TYPES), _at(out, 0, x.dtype), table.rows.data_ptr(), len(table.rows), x.itemsize, back),
        torch.get_num_threads(),
    )


def top_k_rows(rows: Tensor, k: int) -> Tensor:
    """See `reference.top_k_rows`."""
    _check_range("k", k, 1, rows.shape[1])
    columns = torch.empty(len(rows), k, dtype=torch.int64)
    _LIBRARY.compress_top_k(
        *(_at(rows, rows.numel(), _FP32), len(rows), rows.shape[1], k, columns.data_ptr(), torch.get_num_threads())
    )
    return columns


def top_k_rows_of_sum(rows: Tensor, k: int, residual: ResidualBuffers) -> tuple[Tensor, Tensor]:
    """See `reference.top_k_rows_of_sum`. Makes one pass over `rows` and the residual."""
    _check_range("k", k, 1, rows.shape[1])
    columns, values = torch.empty(len(rows), k, dtype=torch.int64), torch.empty(len(rows), k)
    _LIBRARY.compress_top_k_of_sum(
        *(_at(rows, rows.numel(), _FP32), len(rows), rows.shape[1], k, *_residual_arguments(residual, rows.numel())),
        *(columns.data_ptr(), values.data_ptr(), torch.get_num_threads()),
    )
    return columns, values


def pack_bits(values: Tensor, width: int, out: Tensor) -> None:
    """See `reference.pack_bits`. `width` may be at most 56."""
    _check_range("width", width, 0, _MAX_WIDTH)
    needed = -(-values.numel() * width // 8)
    _LIBRARY.compress_pack_bits(
        *(_at(values, values.numel(), torch.int64), values.numel(), width, _at(out, needed, torch.uint8), out.numel())
    )


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """See `reference.unpack_bits`."""
    _check_range("width", width, 0, _MAX_WIDTH)
    _check_range("count", count, 0, _MAX_NUMEL)
    # Checked before memory is allocated for values that do not exist.
    address = _at(packed, -(-count * width // 8), torch.uint8)
    values = torch.empty(count, dtype=torch.int64)
    _LIBRARY.compress_unpack_bits(address, width, count, values.data_ptr())
    return values


def dct_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """See `reference.dct_tiles`. Tiles up to 64 x 64 use C++, larger ones the reference."""
    rows, columns, height, width = tiles.shape
    if max(height, width) > _DCT_TILE:
        reference.dct_tiles(tiles, out, inverse)
        return
    for view in (tiles, out):
        has_contiguous_rows = view.stride(3) == 1 or view.shape[3] == 1
        if view.dtype != _FP32 or view.device.type != "cpu" or view.shape != tiles.shape or not has_contiguous_rows:
            raise ValueError(f"expected fp32 tiles {list(tiles.shape)} with contiguous rows, got {_describe(view)}")
    _LIBRARY.compress_dct(
        *(tiles.data_ptr(), _STRIDES(*tiles.stride()[:3]), out.data_ptr(), _STRIDES(*out.stride()[:3])),
        *(rows, columns, height, width, inverse, torch.get_num_threads()),
    )


def hadamard_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """See `reference.hadamard_tiles`. Tiles must be contiguous."""
    rows, columns, height, width = tiles.shape
    if (height * width).bit_count() > 1:
        raise ValueError(f"blocks of {height * width} elements (allowed: a power of two)")
    numel = tiles.numel()
    _LIBRARY.compress_hadamard(
        *(_at(tiles, numel, _FP32), rows * columns, height * width, _at(out, numel, _FP32), torch.get_num_threads())
    )


def hadamard_at(x: Tensor, out: Tensor, places: Tensor, size: int) -> None:
    """See `reference.hadamard_at`."""
    _check_range("places", int(places.max()) + size if len(places) else 0, 0, min(x.numel(), out.numel()))
    _LIBRARY.compress_hadamard_at(
        *(_at(x, 0, _FP32), _at(places, len(places), torch.int64), len(places), size, _at(out, 0, _FP32)),
        torch.get_num_threads(),
    )
