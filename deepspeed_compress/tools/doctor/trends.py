"""What a noisy series of numbers does: medians of its quarters, smoothed values, its noise, where it turns."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Turn", "noise", "quarters", "smoothed", "turn"]

_MAD_TO_DEVIATION = 0.6745
"""Median of the magnitude of a normal variable, in standard deviations."""


def quarters(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Medians of the four quarters. Needs four values."""
    size = len(values)
    cuts = [values[part * size // 4 : (part + 1) * size // 4] for part in range(4)]
    first, second, third, last = (statistics.median(cut) for cut in cuts)
    return first, second, third, last


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Means of every `window` values that follow each other."""
    return [statistics.fmean(values[end - window : end]) for end in range(window, len(values) + 1)]


def noise(values: Sequence[float]) -> float:
    """Standard deviation of one value about the trend, from the median step between neighbours."""
    steps = [abs(after - before) for before, after in pairwise(values)]
    return statistics.median(steps) / _MAD_TO_DEVIATION / math.sqrt(2) if steps else 0.0


@dataclass(frozen=True)
class Turn:
    """A series that fell and rises again: means of windows at the start, at the lowest point and at the end.

    `lowest_at`, `began_at`: indices of the last value of the lowest window, and of the first that has risen for good.
    `error`: standard error of the difference of two windows.
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
    """The lowest point of `values`, smoothed over a tenth of them, and what came after."""
    window = max(1, len(values) // 10)
    means = smoothed(values, window)
    at = min(range(len(means)), key=means.__getitem__)
    bound = means[at] + (means[-1] - means[at]) / 4
    began = next((index for index in reversed(range(at, len(means))) if means[index] <= bound), at)
    ends = window - 1
    error = noise(values) * math.sqrt(2 / window)
    return Turn(means[0], means[at], means[-1], at + ends, min(began + 1, len(means) - 1) + ends, error)
