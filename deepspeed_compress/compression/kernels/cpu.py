"""The operations of `reference` in C++, for CPU tensors: the same bits, but for sums in fp64 and for `dct_tiles` and
`hadamard_tiles`, which differ from it by rounding. The library is loaded when this module is imported.

All tensors must be contiguous. As many threads work as torch is set to (`torch.get_num_threads`).
"""

import ctypes
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.kernels.compiled import load_library
from deepspeed_compress.compression.kernels.forms import LEVELS, BlockFormat, ResidualBuffers, scale_limit
from deepspeed_compress.compression.kernels.reference import (
    dequantize_rows_add,
    pack_codes,
    quantize_rows,
    quantize_rows_between,
    unpack_codes,
)

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
    "square_norm",
    "top_k_rows",
    "top_k_rows_of_sum",
    "top_k_sampled",
    "uniform",
    "unpack_bits",
    "unpack_codes",
]

_POINTER, _INT, _LONG, _KEY = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
_FLOAT, _DOUBLE = ctypes.c_float, ctypes.c_double
_POINTERS = ctypes.POINTER(_POINTER)
_KINDS: Mapping[str, int] = MappingProxyType({"absmax": 0, "norm": 1, "mean": 2, "lloyd": 3, "eight": 4, "ternary": 5})
_TYPES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 1, torch.bfloat16: 2, torch.float16: 3})
_NO_MEMORY = (0, None, 0.0, None)
_STRIDES = ctypes.c_int64 * 3
_DCT_TILE = 64
"""The largest one."""


def _declared(*parameters: tuple[str, list[type]]) -> ctypes.CDLL:
    library = load_library()
    for name, types in parameters:
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    return library


_LIBRARY = _declared(
    ("compress_uniform", [_LONG, _KEY, _POINTER, _INT]),
    (
        "compress_quantize",
        [
            *(_POINTER, _LONG, _INT, _INT, _INT, _LONG, _DOUBLE, _POINTER, _INT, _POINTER, _LONG, _INT, _KEY),
            *(_INT, _POINTER, _FLOAT, _POINTER, _INT),
        ],
    ),
    (
        "compress_dequantize_add",
        [_POINTERS, _INT, _POINTERS, _INT, _LONG, _INT, _INT, _LONG, _POINTER, _FLOAT, _INT, _INT],
    ),
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
)


def _at(tensor: Tensor) -> int:
    assert tensor.is_contiguous(), f"a view with strides {tensor.stride()}"
    assert tensor.device.type == "cpu", f"a tensor on {tensor.device}"
    return tensor.data_ptr()


def _all_at(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_POINTER * len(tensors))(*map(_at, tensors))


def uniform(count: int, key: int | Tensor, device: torch.device) -> Tensor:
    """See `reference.uniform`."""
    out = torch.empty(count)
    _LIBRARY.compress_uniform(count, int(key), _at(out), torch.get_num_threads())
    return out


def cast(x: Tensor, out: Tensor) -> None:
    """See `reference.cast`."""
    _LIBRARY.compress_cast(_at(x), x.numel(), _at(out), _TYPES[out.dtype], torch.get_num_threads())


def add_cast(values: Tensor, out: Tensor, scale: float) -> None:
    """See `reference.add_cast`."""
    _LIBRARY.compress_add_cast(_at(values), _TYPES[values.dtype], out.numel(), _at(out), scale, torch.get_num_threads())


def square_norm(values: Tensor) -> Tensor:
    """See `reference.square_norm`; sums are in another order."""
    out = torch.empty((), dtype=torch.float64)
    _LIBRARY.compress_square_norm(_at(values), _TYPES[values.dtype], values.numel(), _at(out))
    return out


def quantize_blocks(
    x: Tensor,
    form: BlockFormat,
    numbers: Tensor,
    codes: Tensor,
    key: int | None = None,
    memory: ResidualBuffers | None = None,
) -> None:
    """See `reference.quantize_blocks`: one pass over `x` and the memory."""
    fit = LEVELS.get(form.kind)
    factor = {"absmax": form.levels, "norm": form.levels, "mean": 1}[form.kind] if fit is None else fit.magnitudes[-1]
    _LIBRARY.compress_quantize(
        *(_at(x), x.numel(), _KINDS[form.kind], form.levels, form.bits, form.block_size),
        *(scale_limit(numbers.dtype, factor), _at(numbers), _TYPES[numbers.dtype], _at(codes), codes.numel()),
        *(key is not None, key or 0),
        *(_NO_MEMORY if memory is None else _memory(memory)),
        torch.get_num_threads(),
    )


def _memory(memory: ResidualBuffers) -> tuple[int, int, float, int]:
    assert memory.before.dtype == memory.after.dtype
    return _TYPES[memory.before.dtype], _at(memory.before), memory.decay, _at(memory.after)


def dequantize_blocks_add(numbers: Tensor, codes: Tensor, form: BlockFormat, out: Tensor, scale: float) -> None:
    """See `reference.dequantize_blocks_add`."""
    dequantize_blocks_sum([(numbers, codes)], form, out, scale)


def dequantize_blocks_sum(
    messages: Sequence[tuple[Tensor, Tensor]], form: BlockFormat, out: Tensor, scale: float, add: bool = True
) -> None:
    """See `reference.dequantize_blocks_sum`: one pass over `out`."""
    if not messages:
        return reference.dequantize_blocks_sum(messages, form, out, scale, add)
    numbers, codes = zip(*messages, strict=True)
    _LIBRARY.compress_dequantize_add(
        *(_all_at(numbers), _TYPES[numbers[0].dtype], _all_at(codes), len(messages), out.numel()),
        *(_KINDS[form.kind], form.bits, form.block_size, _at(out), scale, add, torch.get_num_threads()),
    )
    return None


def top_k_rows(rows: Tensor, k: int) -> Tensor:
    """See `reference.top_k_rows`."""
    columns = torch.empty(len(rows), k, dtype=torch.int64)
    _LIBRARY.compress_top_k(_at(rows), len(rows), rows.shape[1], k, _at(columns), torch.get_num_threads())
    return columns


def top_k_rows_of_sum(rows: Tensor, k: int, memory: ResidualBuffers) -> tuple[Tensor, Tensor]:
    """See `reference.top_k_rows_of_sum`: one pass over `rows` and the memory."""
    columns, values = torch.empty(len(rows), k, dtype=torch.int64), torch.empty(len(rows), k)
    _LIBRARY.compress_top_k_of_sum(
        *(_at(rows), len(rows), rows.shape[1], k, *_memory(memory), _at(columns), _at(values)),
        torch.get_num_threads(),
    )
    return columns, values


top_k_sampled = top_k_rows
"""The same elements; a sample saves nothing here, since every group of elements is searched for its maximum first."""


def pack_bits(values: Tensor, width: int, out: Tensor) -> None:
    """See `reference.pack_bits`; `width` up to 56."""
    _LIBRARY.compress_pack_bits(_at(values), values.numel(), width, _at(out), out.numel())


def unpack_bits(packed: Tensor, width: int, count: int) -> Tensor:
    """See `reference.unpack_bits`."""
    values = torch.empty(count, dtype=torch.int64)
    _LIBRARY.compress_unpack_bits(_at(packed), width, count, _at(values))
    return values


def dct_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """See `reference.dct_tiles`; tiles of 64 x 64 by a fast algorithm, larger ones by the reference."""
    rows, columns, height, width = tiles.shape
    if max(height, width) > _DCT_TILE:
        reference.dct_tiles(tiles, out, inverse)
        return
    assert tiles.stride(3) == out.stride(3) == 1, "elements of a row that do not lie side by side"
    _LIBRARY.compress_dct(
        *(tiles.data_ptr(), _STRIDES(*tiles.stride()[:3]), out.data_ptr(), _STRIDES(*out.stride()[:3])),
        *(rows, columns, height, width, inverse, torch.get_num_threads()),
    )


def hadamard_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """See `reference.hadamard_tiles`; tiles are contiguous."""
    rows, columns, height, width = tiles.shape
    _LIBRARY.compress_hadamard(_at(tiles), rows * columns, height * width, _at(out), torch.get_num_threads())
