"""What every launch of a Triton program needs: grids, warps, and tensors and keys as programs take them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["TILE", "alignment", "bits", "flat", "halves", "power_of_two", "programs", "warps"]

TILE = 2048
"""Elements of a program. With `_PER_WARP` it keeps 4 loads of 16 bytes in flight a thread."""
_PER_WARP = 512


def programs(count: int, each: int) -> tuple[int]:
    return (-(-count // each),)


def power_of_two(size: int, least: int) -> int:
    """The smallest one that is neither below `size` nor below `least`."""
    return max(least, 1 << (size - 1).bit_length())


def warps(tile: int) -> int:
    return max(4, tile // _PER_WARP)


def halves(key: int) -> tuple[int, int]:
    """The low and the high 32 bits of `key` as int32: a number above that would make the program another one."""
    return _int32(key & 0xFFFFFFFF), _int32((key >> 32) & 0xFFFFFFFF)


def _int32(bits: int) -> int:
    return bits - ((bits & 0x80000000) << 1)


def alignment(fields: Sequence[Tensor]) -> int:
    """Bytes, at most 16, that divide all addresses of `fields`."""
    return math.gcd(16, *(field.data_ptr() for field in fields))


def flat(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def bits(x: Tensor) -> Tensor:
    """bf16 as the programs take it."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x
