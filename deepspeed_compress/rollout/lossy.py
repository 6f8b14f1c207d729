"""Lossy changes of a flat tensor: differences in blocks of integers, as the method `blockwise` sends gradients.

Sender and receiver compute the new values by the same function, so both hold the same bits.
"""

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors.quantizers import Blockwise

_BLOCK_SIZE = 256
"""Number of values that share a scale."""


def quantize(difference: Tensor, bits: int) -> Tensor:
    """Return the codes (uint8) of finite fp32 differences, rounded to the nearest multiple of their block's scale."""
    codes = torch.zeros(code_bytes(difference.numel(), bits), dtype=torch.uint8)
    _compressor(bits).compress(difference, codes, 0)
    return codes


def code_bytes(numel: int, bits: int) -> int:
    """Return the bytes of the codes of `numel` differences."""
    return _compressor(bits).payload_bytes(numel)


def add(codes: Tensor, bits: int, held: Tensor) -> None:
    """Add the decoded differences to `held` in fp32, and round the sum to its type, in place."""
    total = held.to(torch.float32)
    _compressor(bits).decompress_add(codes, total, 1.0)
    held.copy_(total)


def _compressor(bits: int) -> Blockwise:
    return Blockwise(bits, _BLOCK_SIZE)
