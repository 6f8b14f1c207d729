"""Statistics of noisy series: medians of quarters, smoothed values, noise, and the turning point."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_MAD_TO_DEVIATION = 0.6745
"""Median absolute value of a standard normal variable."""


def quarters(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the medians of the four quarters of `values`, which must hold at least four values."""
    size = len(values)
    cuts = [values[part * size // 4 : (part + 1) * size // 4] for part in range(4)]
    first, second, third, last = (statistics.median(cut) for cut in cuts)
    return first, second, third, last


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return the means of all windows of `window` consecutive values."""
    return [statistics.fmean(values[end - window : end]) for end in range(window, len(values) + 1)]


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation of a value around the trend, estimated from the median step between neighbors."""
    steps = [abs(after - before) for before, after in pairwise(values)]
    return statistics.median(steps) / _MAD_TO_DEVIATION / math.sqrt(2) if steps else 0.0


@dataclass(frozen=True)
class Turn:
    """Turning point of a series that fell and rises again.

    Attributes:
        first: Mean of the first window.
        lowest: Mean of the lowest window.
        last: Mean of the last window.
        lowest_at: Index of the last value of the lowest window.
        began_at: Index of the last value of the first window that has risen for good.
        error: Standard error of the difference between two windows.
    """

    first: float
    lowest: float
    last: float
    lowest_at: int
    began_at: int
    error: float

    @property
    def rise(self) -> float:
        return self.last - self.lowest


def turn(values: Sequence[float]) -> Turn:
    """Return the turning point of `values`, smoothed over windows of a tenth of their number."""
    window = max(1, len(values) // 10)
    means = smoothed(values, window)
    at = min(range(len(means)), key=means.__getitem__)
    bound = means[at] + (means[-1] - means[at]) / 4
    began = next((index for index in reversed(range(at, len(means))) if means[index] <= bound), at)
    ends = window - 1
    error = noise(values) * math.sqrt(2 / window)
    return Turn(means[0], means[at], means[-1], at + ends, min(began + 1, len(means) - 1) + ends, error)
