"""Plain torch kernels for orthonormal changes of basis, as matrix products."""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


def dct_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """Write the orthonormal DCT-II of each of `tiles`, in both directions, to `out`, which must not overlap `tiles`.

    Both are fp32 [rows, columns, h, w], views with any strides whose rows are contiguous.
    """
    _change_basis(tiles, out, inverse, dct_matrix)


def hadamard_tiles(tiles: Tensor, out: Tensor, inverse: bool) -> None:
    """Write Sylvester's matrix of h * w rows, times (h * w)**-0.5, times each of `tiles` to `out`.

    Both are fp32 [rows, columns, h, w]. A tile is treated as a vector of h * w elements, where h and w are powers of
    two: H_n = H_h (x) H_w (Kronecker product).
    """
    _change_basis(tiles, out, inverse, _hadamard_matrix)


def _change_basis(tiles: Tensor, out: Tensor, inverse: bool, basis: Callable[[int, torch.device], Tensor]) -> None:
    """Compute A_h X A_w^T for all tiles X or, if `inverse`, A_h^T Y A_w for all tiles Y, with A_n orthonormal."""
    left, right = (basis(size, tiles.device) for size in tiles.shape[2:])
    if inverse:
        left, right = left.T, right.T
    out.copy_(left @ (tiles @ right.T))


@lru_cache(maxsize=1024)
def dct_matrix(size: int, device: torch.device) -> Tensor:
    """Return fp32 [size, size] with entries (k, n) of sqrt(c / size) cos(pi (2 n + 1) k / (2 size)).

    c is 1 for k = 0, else 2.
    """
    numbers = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / (2 * size) * torch.outer(numbers, 2 * numbers + 1)) * math.sqrt(2 / size)
    matrix[0] = math.sqrt(1 / size)
    return matrix.to(device, torch.float32)


@lru_cache(maxsize=1024)
def _hadamard_matrix(size: int, device: torch.device) -> Tensor:
    """Return fp32 [size, size] with entries (i, j) of (-1)**popcount(i & j) / sqrt(size), for `size` a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.mul_(size**-0.5).to(device, torch.float32)
