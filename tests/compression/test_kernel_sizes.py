"""Sizes, types and places that the C++ kernels would not survive: each is a Python exception before the call."""

from collections.abc import Callable

import pytest
import torch

from deepspeed_compress.compression.kernels import implementations
from deepspeed_compress.compression.kernels.forms import BlockFormat, ResidualBuffers

CPU = torch.device("cpu")
cpu = implementations(CPU)["cpu"]
FORM = BlockFormat("absmax", 7, 4, 64)
X, NUMBERS, CODES = torch.zeros(128), torch.zeros(2), torch.zeros(64, dtype=torch.uint8)
ROWS = torch.zeros(3, 10)


def form(**changes: int) -> BlockFormat:
    return BlockFormat(**{**vars(FORM), **changes})


def memory(before: torch.Tensor, after: torch.Tensor) -> ResidualBuffers:
    return ResidualBuffers(before, 1.0, after)


TILES = torch.zeros(1, 1, 4, 4)
CALLS: dict[str, Callable[[], object]] = {
    "negative count of random numbers": lambda: cpu.uniform(-1, 0, CPU),
    "room of a cast": lambda: cpu.cast(X, torch.zeros(127)),
    "source of a cast": lambda: cpu.cast(X.double(), torch.zeros(128)),
    "type of a cast": lambda: cpu.cast(X, torch.zeros(128, dtype=torch.int32)),
    "values to be added": lambda: cpu.add_cast(torch.zeros(127), X.clone(), 1.0),
    "type of sums": lambda: cpu.add_cast(X, X.double(), 1.0),
    "integers to be summed": lambda: cpu.square_norm(CODES),
    "scales": lambda: cpu.quantize_blocks(X, FORM, NUMBERS[:1], CODES.clone()),
    "codes": lambda: cpu.quantize_blocks(X, FORM, NUMBERS.clone(), CODES[:63]),
    "codes of another type": lambda: cpu.quantize_blocks(X, FORM, NUMBERS.clone(), CODES.float()),
    "elements of another type": lambda: cpu.quantize_blocks(X.bfloat16(), FORM, NUMBERS.clone(), CODES.clone()),
    "elements with gaps": lambda: cpu.quantize_blocks(torch.zeros(256)[::2], FORM, NUMBERS.clone(), CODES.clone()),
    "no block size": lambda: cpu.quantize_blocks(X, form(block_size=0), NUMBERS.clone(), CODES.clone()),
    "a negative block size": lambda: cpu.quantize_blocks(X, form(block_size=-64), NUMBERS.clone(), CODES.clone()),
    "too many bits": lambda: cpu.quantize_blocks(X, form(bits=9), NUMBERS.clone(), torch.zeros(400, dtype=torch.uint8)),
    "a short memory": lambda: cpu.quantize_blocks(
        X, FORM, NUMBERS.clone(), CODES.clone(), None, memory(X[:100].clone(), X.clone())
    ),
    "memories of two types": lambda: cpu.quantize_blocks(
        X, FORM, NUMBERS.clone(), CODES.clone(), None, memory(X.clone(), X.bfloat16())
    ),
    "a short message": lambda: cpu.dequantize_blocks_add(NUMBERS, CODES[:10], FORM, X.clone(), 1.0),
    "a message with few scales": lambda: cpu.dequantize_blocks_add(NUMBERS[:1], CODES, FORM, X.clone(), 1.0),
    "a second short message": lambda: cpu.dequantize_blocks_sum(
        [(NUMBERS, CODES), (NUMBERS, CODES[:-1])], FORM, X.clone(), 1.0
    ),
    "scales of two types": lambda: cpu.dequantize_blocks_sum(
        [(NUMBERS, CODES), (NUMBERS.half(), CODES)], FORM, X.clone(), 1.0
    ),
    "more than there are": lambda: cpu.top_k_rows(ROWS, 11),
    "none of a row": lambda: cpu.top_k_rows(ROWS, 0),
    "rows of another type": lambda: cpu.top_k_rows(ROWS.double(), 3),
    "a short memory of rows": lambda: cpu.top_k_rows_of_sum(ROWS, 3, memory(torch.zeros(29), torch.zeros(30))),
    "more of a sum than there are": lambda: cpu.top_k_rows_of_sum(ROWS, 11, memory(torch.zeros(30), torch.zeros(30))),
    "packed bits": lambda: cpu.unpack_bits(CODES, 13, 40),
    "a negative count": lambda: cpu.unpack_bits(CODES, 13, -1),
    "an endless count": lambda: cpu.unpack_bits(CODES, 13, 1 << 50),
    "a wide integer": lambda: cpu.unpack_bits(CODES, 57, 1),
    "room for bits": lambda: cpu.pack_bits(torch.zeros(40, dtype=torch.int64), 13, CODES.clone()),
    "integers of another type": lambda: cpu.pack_bits(torch.zeros(4), 13, CODES.clone()),
    "a negative width": lambda: cpu.pack_bits(torch.zeros(4, dtype=torch.int64), -1, CODES.clone()),
    "room for tiles": lambda: cpu.dct_tiles(TILES, torch.zeros(1, 1, 4, 3), False),
    "tiles of another type": lambda: cpu.dct_tiles(TILES.double(), torch.zeros(1, 1, 4, 4), False),
    "columns of tiles": lambda: cpu.dct_tiles(TILES.transpose(2, 3), torch.zeros(1, 1, 4, 4), False),
    "no power of two": lambda: cpu.hadamard_tiles(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), False),
    "room for blocks": lambda: cpu.hadamard_tiles(TILES, torch.zeros(1, 1, 4, 3), False),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_does_not_fit_is_an_exception(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"expected|allowed"):
        call()


def test_nothing_at_all_is_no_exception() -> None:
    nothing, codes = torch.zeros(0), torch.zeros(0, dtype=torch.uint8)
    cpu.quantize_blocks(nothing, FORM, nothing.clone(), codes)
    cpu.dequantize_blocks_add(nothing, codes, FORM, nothing.clone(), 1.0)
    cpu.cast(nothing, nothing.clone())
    cpu.add_cast(nothing, nothing.clone(), 1.0)
    assert cpu.unpack_bits(codes, 0, 5).tolist() == [0] * 5
    cpu.pack_bits(torch.zeros(0, dtype=torch.int64), 7, codes)
    assert cpu.top_k_rows(torch.zeros(0, 4), 2).shape == (0, 2)
