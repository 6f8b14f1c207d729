"""Reference implementations of the quantizers in float64, one block at a time.

They follow the equations of the papers, in numpy, and are independent of the package.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Grid:
    """A block on a grid of equal steps. `position` is the position of each element, in steps from `offset`."""

    position: Doubles
    step: float
    offset: float = 0.0

    def decode(self, uniforms: Doubles | None = None) -> Doubles:
        """Return the nearest grid points or, with `uniforms` in [0, 1), stochastically rounded ones."""
        if uniforms is None:
            return self.offset + self.step * np.rint(self.position)
        lower = np.floor(self.position)
        return self.offset + self.step * np.where(uniforms >= 1 - (self.position - lower), lower + 1, lower)

    def undecided(self, uniforms: Doubles | None = None) -> NDArray[np.bool_]:
        """Return True where fp32 may round to the other neighbor."""
        shifted = self.position + (0.5 if uniforms is None else uniforms)
        return np.abs(shifted - np.rint(shifted)) < 1e-3

    def standard_error(self, count: int) -> Doubles:
        """Return the standard error of the mean of `count` independent stochastic roundings."""
        fraction = self.position - np.floor(self.position)
        return self.step * np.sqrt(fraction * (1 - fraction) / count)


def absmax(x: Doubles, bits: int) -> Grid:
    """Return the grid of arXiv:2110.02861, section 2.1, with 2**(bits-1) - 1 levels on either side of zero."""
    step = float(np.abs(x).max()) / (2 ** (bits - 1) - 1)
    return Grid(x / step, step)


def percentile(x: Doubles, bits: int, percent: float) -> Grid:
    """Return the grid of `absmax` for the block clipped at the nearest-rank percentile of its magnitudes."""
    levels = 2 ** (bits - 1) - 1
    limit = float(np.percentile(np.abs(x), percent, method="inverted_cdf"))
    return Grid(np.clip(x, -limit, limit) / limit * levels, limit / levels)


def linear(x: Doubles, bits: int) -> Grid:
    """Return the grid of arXiv:1611.00429, section 2.2: 2**bits levels from the smallest to the largest element."""
    low, high = float(x.min()), float(x.max())
    if low == high:
        return Grid(np.zeros_like(x), 0.0, low)
    step = (high - low) / (2**bits - 1)
    return Grid((x - low) / step, step, low)


def qsgd(x: Doubles, levels: int) -> Grid:
    """Return the grid of arXiv:1610.02132, equation 3.1, with s = `levels` steps per norm."""
    norm = math.sqrt(sum(float(element) ** 2 for element in x))
    return Grid(x / norm * levels, norm / levels)


def qsgd_values(x: Doubles, levels: int, coins: Doubles) -> Doubles:
    """Return ||x|| sign(x) xi of equation 3.1, with xi = (l + 1) / s where the coin is below p(|x| / ||x||, s)."""
    norm = math.sqrt(sum(float(element) ** 2 for element in x))
    values = []
    for element, coin in zip(x, coins, strict=True):
        ratio = abs(element) / norm
        lower = math.floor(ratio * levels)
        chance = ratio * levels - lower
        values.append(norm * math.copysign(1, element) * (lower + (coin < chance)) / levels)
    return np.array(values)


def scaled_sign(x: Doubles) -> Doubles:
    """Return (||x||_1 / d) sign(x) with sign(0) = 1 (arXiv:1901.09847, algorithm 1)."""
    return np.where(x >= 0, 1.0, -1.0) * (sum(abs(float(element)) for element in x) / len(x))


def terngrad(x: Doubles, uniforms: Doubles) -> Doubles:
    """Return s sign(g) b with s = max |g| and P(b = 1) = |g| / s (arXiv:1705.07878, section 3).

    b is 1 where the uniform number is in the upper (g > 0) or lower (g < 0) |g| / s of [0, 1).
    """
    largest = float(np.abs(x).max())
    chance = np.abs(x) / largest
    chosen = np.where(x > 0, uniforms >= 1 - chance, uniforms < chance)
    return largest * np.where(chosen, np.sign(x), 0.0)


def nearest_level(magnitudes: Sequence[int], x: Doubles, scale: float) -> Doubles:
    """Return the nearest of +-`magnitudes` times `scale` to each element, by trying all."""
    levels: Doubles = scale * np.array([sign * magnitude for sign in (-1.0, 1.0) for magnitude in magnitudes])
    nearest: Doubles = levels[np.abs(levels - x[:, None]).argmin(axis=1)]
    return nearest


def squared_error(x: Doubles, decoded: Doubles) -> float:
    """Return the squared error relative to ||x||^2."""
    return float(((x - decoded) ** 2).sum() / (x**2).sum())


def best_scale(x: Doubles, quantize: Callable[[Doubles, float], Doubles]) -> float:
    """Return the scale with the smallest squared error among 400 scales up to the largest magnitude."""
    candidates = np.abs(x).max() * np.arange(1, 401) / 400
    return float(min(candidates, key=lambda scale: squared_error(x, quantize(x, float(scale)))))


def fp8_numbers(exponent_bits: int, infinities: bool) -> Doubles:
    """Return all finite numbers of an 8-bit format (arXiv:2209.05433, table 1), ascending.

    With `infinities`, the last exponent encodes infinities and NaN, as in IEEE 754. Otherwise, only the code with all
    bits set is NaN.
    """
    fraction_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    numbers = []
    for code in range(128):
        exponent, fraction = code >> fraction_bits, code % 2**fraction_bits
        if (infinities and exponent == 2**exponent_bits - 1) or code == 127:
            continue
        mantissa = fraction / 2**fraction_bits + (exponent > 0)
        numbers.append(mantissa * 2.0 ** (max(exponent, 1) - bias))
    return np.array(sorted({sign * number for number in numbers for sign in (-1, 1)}))


def fp8(x: Doubles, numbers: Doubles) -> tuple[Doubles, NDArray[np.bool_]]:
    """Return the nearest of `numbers` times the block's scale for each element, and a mask of near ties."""
    scale = np.abs(x).max() / numbers.max()
    distances = np.abs(numbers - (x / scale)[:, None])
    nearest, second = np.sort(distances, axis=1)[:, :2].T
    return scale * numbers[distances.argmin(axis=1)], second - nearest < 1e-3 * (second + nearest)
