"""Plain torch: orthonormal changes of basis, as products with matrices."""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["dct_matrix", "dct_tiles", "hadamard_tiles"]


def dct_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """The orthonormal DCT-II of each of `tiles` in both directions, to `out`, elsewhere in memory.

    Both are fp32 [rows, columns, h, w], views of any strides in which the elements of a row lie side by side.
    """
    _change_basis(tiles, out, inverse, dct_matrix)


def hadamard_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """Sylvester's matrix of h * w rows, times (h * w)**-0.5, times each of `tiles`, to `out`.

    Both are fp32 [rows, columns, h, w]. A tile counts as a vector of h * w elements, powers of two: H_n = H_h (x) H_w
    (Kronecker product).
    """
    _change_basis(tiles, out, inverse, _hadamard_matrix)


def _change_basis(tiles: Tensor, out: Tensor, inverse: bool, basis: Callable[[int, torch.device], Tensor]) -> None:
    """A_h X A_w^T of all tiles X, or of all Y the inverse A_h^T Y A_w; A_n orthonormal."""
    left, right = (basis(size, tiles.device) for size in tiles.shape[2:])
    if inverse:
        left, right = left.T, right.T
    out.copy_(left @ (tiles @ right.T))


@lru_cache(maxsize=1024)
def dct_matrix(size: int, device: torch.device) -> Tensor:
    """fp32 [size, size]: entry (k, n) is sqrt((1 or 2) / size) cos(pi (2 n + 1) k / (2 size)), 1 for k = 0."""
    numbers = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / (2 * size) * torch.outer(numbers, 2 * numbers + 1)) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return matrix.to(device, torch.float32)


@lru_cache(maxsize=1024)
def _hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """fp32 [size, size]: entry (i, j) is (-1)**popcount(i & j) / sqrt(size), `size` a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.mul_(size**-0.5).to(device, torch.float32)
