"""Invalid sizes, dtypes and devices raise a Python exception before a C++ kernel is called."""

from collections.abc import Callable

import pytest
import torch

from deepspeed_compress.compression.kernels import implementations
from deepspeed_compress.compression.kernels.arguments import BlockFormat, ResidualBuffers

CPU = torch.device("cpu")
cpu = implementations(CPU)["cpu"]
FORM = BlockFormat("absmax", 7, 4, 64)
X, NUMBERS, CODES = torch.zeros(128), torch.zeros(2), torch.zeros(64, dtype=torch.uint8)
ROWS = torch.zeros(3, 10)


def form(**changes: int) -> BlockFormat:
    return BlockFormat(**{**vars(FORM), **changes})


def residual(before: torch.Tensor, after: torch.Tensor) -> ResidualBuffers:
    return ResidualBuffers(before, 1.0, after)


TILES = torch.zeros(1, 1, 4, 4)
CALLS: dict[str, Callable[[], object]] = {
    "negative count of random numbers": lambda: cpu.uniform(-1, 0, CPU),
    "short output of a cast": lambda: cpu.cast(X, torch.zeros(127)),
    "wrong dtype of a cast": lambda: cpu.cast(X.double(), torch.zeros(128)),
    "wrong target dtype of a cast": lambda: cpu.cast(X, torch.zeros(128, dtype=torch.int32)),
    "too few values to add": lambda: cpu.add_cast(torch.zeros(127), X.clone(), 1.0),
    "wrong dtype of a sum": lambda: cpu.add_cast(X, X.double(), 1.0),
    "norm of integers": lambda: cpu.square_norm(CODES),
    "too few scales": lambda: cpu.quantize_blocks(X, FORM, NUMBERS[:1], CODES.clone()),
    "too few codes": lambda: cpu.quantize_blocks(X, FORM, NUMBERS.clone(), CODES[:63]),
    "wrong dtype of codes": lambda: cpu.quantize_blocks(X, FORM, NUMBERS.clone(), CODES.float()),
    "wrong dtype of elements": lambda: cpu.quantize_blocks(X.bfloat16(), FORM, NUMBERS.clone(), CODES.clone()),
    "elements that are not contiguous": lambda: cpu.quantize_blocks(
        torch.zeros(256)[::2], FORM, NUMBERS.clone(), CODES.clone()
    ),
    "zero block size": lambda: cpu.quantize_blocks(X, form(block_size=0), NUMBERS.clone(), CODES.clone()),
    "negative block size": lambda: cpu.quantize_blocks(X, form(block_size=-64), NUMBERS.clone(), CODES.clone()),
    "too many bits": lambda: cpu.quantize_blocks(X, form(bits=9), NUMBERS.clone(), torch.zeros(400, dtype=torch.uint8)),
    "short residual": lambda: cpu.quantize_blocks(
        X, FORM, NUMBERS.clone(), CODES.clone(), None, residual(X[:100].clone(), X.clone())
    ),
    "residuals of two dtypes": lambda: cpu.quantize_blocks(
        X, FORM, NUMBERS.clone(), CODES.clone(), None, residual(X.clone(), X.bfloat16())
    ),
    "short message": lambda: cpu.dequantize_blocks_add(NUMBERS, CODES[:10], FORM, X.clone(), 1.0),
    "message with too few scales": lambda: cpu.dequantize_blocks_add(NUMBERS[:1], CODES, FORM, X.clone(), 1.0),
    "short second message": lambda: cpu.dequantize_blocks_sum(
        [(NUMBERS, CODES), (NUMBERS, CODES[:-1])], FORM, X.clone(), 1.0
    ),
    "scales of two dtypes": lambda: cpu.dequantize_blocks_sum(
        [(NUMBERS, CODES), (NUMBERS.half(), CODES)], FORM, X.clone(), 1.0
    ),
    "k larger than a row": lambda: cpu.top_k_rows(ROWS, 11),
    "k of zero": lambda: cpu.top_k_rows(ROWS, 0),
    "wrong dtype of rows": lambda: cpu.top_k_rows(ROWS.double(), 3),
    "short residual of rows": lambda: cpu.top_k_rows_of_sum(ROWS, 3, residual(torch.zeros(29), torch.zeros(30))),
    "k larger than a row of a sum": lambda: cpu.top_k_rows_of_sum(ROWS, 11, residual(torch.zeros(30), torch.zeros(30))),
    "too few packed bits": lambda: cpu.unpack_bits(CODES, 13, 40),
    "negative count": lambda: cpu.unpack_bits(CODES, 13, -1),
    "huge count": lambda: cpu.unpack_bits(CODES, 13, 1 << 50),
    "too wide integers": lambda: cpu.unpack_bits(CODES, 57, 1),
    "short output for bits": lambda: cpu.pack_bits(torch.zeros(40, dtype=torch.int64), 13, CODES.clone()),
    "wrong dtype of integers": lambda: cpu.pack_bits(torch.zeros(4), 13, CODES.clone()),
    "negative width": lambda: cpu.pack_bits(torch.zeros(4, dtype=torch.int64), -1, CODES.clone()),
    "short output for tiles": lambda: cpu.dct_tiles(TILES, torch.zeros(1, 1, 4, 3), False),
    "wrong dtype of tiles": lambda: cpu.dct_tiles(TILES.double(), torch.zeros(1, 1, 4, 4), False),
    "tiles with strided rows": lambda: cpu.dct_tiles(TILES.transpose(2, 3), torch.zeros(1, 1, 4, 4), False),
    "not a power of two": lambda: cpu.hadamard_tiles(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), False),
    "short output for blocks": lambda: cpu.hadamard_tiles(TILES, torch.zeros(1, 1, 4, 3), False),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_invalid_argument_raises(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"expected|allowed"):
        call()


def test_empty_tensors_are_accepted() -> None:
    empty, codes = torch.zeros(0), torch.zeros(0, dtype=torch.uint8)
    cpu.quantize_blocks(empty, FORM, empty.clone(), codes)
    cpu.dequantize_blocks_add(empty, codes, FORM, empty.clone(), 1.0)
    cpu.cast(empty, empty.clone())
    cpu.add_cast(empty, empty.clone(), 1.0)
    assert cpu.unpack_bits(codes, 0, 5).tolist() == [0] * 5
    cpu.pack_bits(torch.zeros(0, dtype=torch.int64), 7, codes)
    assert cpu.top_k_rows(torch.zeros(0, 4), 2).shape == (0, 2)
