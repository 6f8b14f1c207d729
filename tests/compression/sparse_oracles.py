"""Reference implementations of the sparsifiers in numpy and plain loops, independent of the package."""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]


def kept_of(density: str, width: int) -> int:
    """Return ceil(density * width) in exact arithmetic."""
    return math.ceil(Fraction(density) * width)


def largest(sizes: NDArray[np.floating], count: int) -> list[int]:
    """Return the ascending indices of the `count` largest of `sizes`; NaN is largest, ties go to the lower index."""
    order = sorted(range(len(sizes)), key=lambda index: (not np.isnan(sizes[index]), -sizes[index], index))
    return sorted(order[:count])


def top_k(x: NDArray[np.floating], density: str, block: int) -> Indices:
    """Return the ascending positions that top-k keeps in all blocks of `block` elements."""
    found: list[int] = []
    for start in range(0, len(x), block):
        part = np.abs(x[start : start + block])
        found += [start + column for column in largest(part, kept_of(density, len(part)))]
    return np.array(found, dtype=np.int64)


def group_top_k(x: Floats, density: str, block: int, group: int) -> Indices:
    """Return the ascending numbers of the groups of `group` elements with the largest L2 norms (float64) per block."""
    norms = [np.linalg.norm(x[start : start + group].astype(np.float64)) for start in range(0, len(x), group)]
    return top_k(np.array(norms, dtype=np.float64), density, block // group)


def only(x: Floats, positions: Indices) -> Floats:
    """Return `x` at `positions`, and 0 elsewhere."""
    kept = np.zeros_like(x)
    kept[positions] = x[positions]
    return kept


def packed_bits(values: Indices, width: int) -> bytes:
    """Return the little-endian bit string of `values`, padded to a multiple of 4 bytes."""
    number = sum(int(value) << (width * index) for index, value in enumerate(values))
    size = -(-width * len(values) // 8)
    return number.to_bytes(size, "little") + bytes(-size % 4)
