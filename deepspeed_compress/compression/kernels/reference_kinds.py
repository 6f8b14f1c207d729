"""Kinds of block formats in plain torch: how scales are chosen, and elements are coded.

A "row" is one quantization block.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels.arguments import LEVELS, FittedLevels, fitted


@dataclass(frozen=True)
class Kind:
    """The functions of one kind of block format.

    Attributes:
        scales: from rows (fp32 [r, b]), levels and dtype to scales, fp32 [r], exact in that dtype.
        codes: from rows, scales, levels and noise to codes, one byte each [r, b].
        signed: from codes (uint8) and their number of bits to multiples of the scale, int8.
    """

    scales: Callable[[Tensor, int, torch.dtype], Tensor]
    codes: Callable[[Tensor, Tensor, int, Tensor | None], Tensor]
    signed: Callable[[Tensor, int], Tensor]


def quantize_rows(rows: Tensor, scales: Tensor, levels: int, noise: Tensor | None) -> Tensor:
    """Return `rows` (fp32 [r, b]) / `scales` (fp32 [r]), rounded and clipped to -levels..levels: int8 [r, b].

    NaN becomes 0. `noise` (fp32 [r, b] in [0, 1)) selects stochastic rounding; None rounds to nearest even.
    """
    # A scale may underflow to zero, or be so small that the quotient leaves the range of int8.
    quotient = rows / torch.where(scales > 0, scales, torch.ones_like(scales)).unsqueeze(1)
    quotient = quotient.round_() if noise is None else quotient.add_(noise).floor_()
    return quotient.clamp_(-levels, levels).nan_to_num_(0.0).to(torch.int8)


def _absmax_scales(rows: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    largest = rows.abs().amax(dim=1)
    # Divide by a tensor: a GPU would replace division by a number with multiplication by its reciprocal.
    return fitted(largest / torch.full_like(largest, levels), dtype, levels)


def _norm_scales(rows: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    # The squares of fp32 numbers neither overflow nor underflow in fp64.
    return fitted(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64) / levels, dtype, levels)


def _mean_scales(rows: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    # In fp64, since the sum of finite elements may overflow.
    return fitted(rows.abs().mean(dim=1, dtype=torch.float64), dtype)


def _lloyd_scales(fit: FittedLevels, rows: Tensor, levels: int, dtype: torch.dtype) -> Tensor:
    """Fit the scales with fp64 sums, which cannot overflow and hardly depend on the order of summation."""
    magnitudes = rows.abs()
    exact = magnitudes.to(torch.float64)
    scales = exact.mean(dim=1) * fit.start
    for _ in range(fit.iterations):
        # A scale beyond fp32 would exceed every element's magnitude.
        nearest = _nearest(fit, magnitudes, scales.clamp(max=torch.finfo(torch.float32).max).to(torch.float32))
        # Sums of small squares are exact in fp32, and much faster than in int64.
        scales = (exact * nearest).sum(dim=1) / nearest.square().sum(dim=1)
    return fitted(scales, dtype, levels)


def _nearest(fit: FittedLevels, magnitudes: Tensor, scales: Tensor) -> Tensor:
    """Return the magnitude of `fit` that is nearest to each of `magnitudes` [r, b], given the scales [r]: fp32."""
    nearest = torch.full_like(magnitudes, fit.magnitudes[0])
    for border, low, high in zip(fit.borders, fit.magnitudes, fit.magnitudes[1:], strict=False):
        nearest += (high - low) * (magnitudes >= (scales * border).unsqueeze(1))
    return nearest


def _places(fit: FittedLevels, rows: Tensor, scales: Tensor) -> Tensor:
    """Return the index of the nearest magnitude of `fit` for each element of `rows` [r, b], given scales [r]: uint8."""
    magnitudes, places = rows.abs(), torch.zeros_like(rows, dtype=torch.uint8)
    for border in fit.borders:
        places += magnitudes >= (scales * border).unsqueeze(1)
    return places


def _sign_and_place(fit: FittedLevels, rows: Tensor, scales: Tensor, levels: int, noise: Tensor | None) -> Tensor:
    return (rows >= 0).to(torch.uint8) * len(fit.magnitudes) + _places(fit, rows, scales)


def _trits(fit: FittedLevels, rows: Tensor, scales: Tensor, levels: int, noise: Tensor | None) -> Tensor:
    places = _places(fit, rows, scales)
    return torch.where(rows >= 0, 1 + places, 1 - places)


def _lloyd_kind(kind: str, codes: Callable[..., Tensor], signed: Callable[[Tensor, int], Tensor]) -> Kind:
    return Kind(functools.partial(_lloyd_scales, LEVELS[kind]), functools.partial(codes, LEVELS[kind]), signed)


def _eight_signed(codes: Tensor, bits: int) -> Tensor:
    """Decode kind "eight", whose magnitudes are the triangular numbers 1, 3, 6 and 10."""
    place = codes & 3
    return ((place + 1) * (place + 2) >> 1).view(torch.int8) * ((codes >> 1 & 2).view(torch.int8) - 1)


def _sign_extended(codes: Tensor, bits: int) -> Tensor:
    return (codes << 8 - bits).view(torch.int8) >> 8 - bits


KINDS: Mapping[str, Kind] = {
    "absmax": Kind(_absmax_scales, quantize_rows, _sign_extended),
    "norm": Kind(_norm_scales, quantize_rows, _sign_extended),
    "mean": Kind(
        _mean_scales,
        lambda rows, scales, levels, noise: (rows >= 0).to(torch.uint8),
        lambda codes, bits: codes.view(torch.int8) * 2 - 1,
    ),
    "lloyd": _lloyd_kind(
        "lloyd",
        _sign_and_place,
        lambda codes, bits: ((codes & 1) * 3 + 1).view(torch.int8) * ((codes & 2).view(torch.int8) - 1),
    ),
    "eight": _lloyd_kind("eight", _sign_and_place, _eight_signed),
    "ternary": _lloyd_kind("ternary", _trits, lambda codes, bits: codes.view(torch.int8) - 1),
}
