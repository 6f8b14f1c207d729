"""Helpers for launching Triton programs: grids, warps, and tensors and keys in the form that programs expect."""

import torch
from torch import Tensor

TILE = 2048
"""Elements per program. With `_PER_WARP`, this keeps four 16-byte loads per thread in flight."""
_PER_WARP = 512


def programs(count: int, each: int) -> tuple[int]:
    return (-(-count // each),)


def power_of_two(size: int, least: int) -> int:
    """Return the smallest power of two that is at least `size`, or `least` if that is larger."""
    return max(least, 1 << (size - 1).bit_length())


def warps(tile: int) -> int:
    return max(4, tile // _PER_WARP)


def halves(key: int) -> tuple[int, int]:
    """Return the low and high 32 bits of `key` as int32. A larger number would make Triton compile another program."""
    return _int32(key & 0xFFFFFFFF), _int32((key >> 32) & 0xFFFFFFFF)


def _int32(bits: int) -> int:
    return bits - ((bits & 0x80000000) << 1)


def flat(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def bits(x: Tensor) -> Tensor:
    """Return `x`, viewed as int16 if it is bf16, as the programs expect it."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x
