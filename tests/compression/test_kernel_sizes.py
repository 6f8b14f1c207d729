"""Invalid sizes, dtypes and devices raise a Python exception before a C++ kernel is called."""

from collections.abc import Callable

import pytest
import torch

from deepspeed_compress.compression.kernels import implementations
from deepspeed_compress.compression.kernels.arguments import FIRST, BlockFormat, ResidualBuffers, single

CPU = torch.device("cpu")
cpu = implementations(CPU)["cpu"]
FORM = BlockFormat("absmax", 7, 4, 64)
X, CODES = torch.zeros(128), torch.zeros(64, dtype=torch.uint8)
TABLE, OUT = single(128, 72), torch.zeros(72, dtype=torch.uint8)
ROWS = torch.zeros(3, 10)


def form(**changes: int) -> BlockFormat:
    return BlockFormat(**{**vars(FORM), **changes})


def residual(before: torch.Tensor, after: torch.Tensor) -> ResidualBuffers:
    return ResidualBuffers(before, 1.0, after)


def encode(x: torch.Tensor, one: BlockFormat, out: torch.Tensor, memory: ResidualBuffers | None = None) -> None:
    cpu.quantize_messages(x, FIRST, one, out, TABLE, None, memory)


def decode(payloads: torch.Tensor) -> None:
    cpu.dequantize_messages(payloads, FORM, TABLE, X.clone(), FIRST, 1.0, True)


TILES = torch.zeros(1, 1, 4, 4)
CALLS: dict[str, Callable[[], object]] = {
    "negative count of random numbers": lambda: cpu.uniform(-1, 0, CPU),
    "short output of a cast": lambda: cpu.cast(X, torch.zeros(127)),
    "wrong dtype of a cast": lambda: cpu.cast(X.double(), torch.zeros(128)),
    "wrong target dtype of a cast": lambda: cpu.cast(X, torch.zeros(128, dtype=torch.int32)),
    "too few values to add": lambda: cpu.add_cast(torch.zeros(127), X.clone(), 1.0),
    "wrong dtype of a sum": lambda: cpu.add_cast(X, X.double(), 1.0),
    "norm of integers": lambda: cpu.square_norm(CODES),
    "too few bytes of a message": lambda: encode(X, FORM, OUT[:-1].clone()),
    "wrong dtype of a message": lambda: encode(X, FORM, OUT.float()),
    "wrong dtype of elements": lambda: encode(X.bfloat16(), FORM, OUT.clone()),
    "elements that are not contiguous": lambda: encode(torch.zeros(256)[::2], FORM, OUT.clone()),
    "zero block size": lambda: encode(X, form(block_size=0), OUT.clone()),
    "negative block size": lambda: encode(X, form(block_size=-64), OUT.clone()),
    "too many bits": lambda: encode(X, form(bits=9), torch.zeros(400, dtype=torch.uint8)),
    "short residual": lambda: encode(X, FORM, OUT.clone(), residual(X[:100].clone(), X.clone())),
    "residuals of two dtypes": lambda: encode(X, FORM, OUT.clone(), residual(X.clone(), X.bfloat16())),
    "short message": lambda: decode(OUT[None, :-1]),
    "short second message": lambda: decode(OUT.repeat(2, 1)[:, :-4]),
    "rows of messages with gaps": lambda: decode(OUT.repeat(2, 2)[:, ::2]),
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
    cpu.quantize_messages(empty, FIRST, FORM, codes, single(0, 0), None, None)
    cpu.dequantize_messages(codes[None], FORM, single(0, 0), empty.clone(), FIRST, 1.0, True)
    cpu.cast(empty, empty.clone())
    cpu.add_cast(empty, empty.clone(), 1.0)
    assert cpu.unpack_bits(codes, 0, 5).tolist() == [0] * 5
    cpu.pack_bits(torch.zeros(0, dtype=torch.int64), 7, codes)
    assert cpu.top_k_rows(torch.zeros(0, 4), 2).shape == (0, 2)
