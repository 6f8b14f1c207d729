"""Trends of noisy series: medians of quarters, the turning point, and the rise of a loss at exchanges of islands."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from deepspeed_compress.tools.doctor.case import SAMPLES, Case

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


@dataclass(frozen=True)
class Rise:
    """Rise of the loss at exchanges.

    Attributes:
        mean: Mean rise of the loss from the step before an exchange to the step after it.
        before: Median loss before the exchanges.
        exchanges: Number of exchanges considered.
    """

    mean: float
    before: float
    exchanges: int


def after_exchanges(case: Case) -> list[int]:
    """Return the measured steps that follow an exchange. The bytes of the exchange are counted in these steps."""
    return [line["step"] for line in case.run.steps if line.get("bytes_islands")]


def count_exchanges(case: Case) -> int:
    """Return the number of exchanges of this island, estimated if not all steps are measured."""
    every = case.run.section.monitor.every if case.run.section is not None else 1
    return every * len(after_exchanges(case))


def rise_at_exchanges(case: Case) -> Rise | None:
    """Return the rise of the loss at exchanges, or None if there are too few exchanges or the rise is within the noise.

    Only the later half of the exchanges is considered, because early in training every exchange improves the loss.
    """
    losses = dict(case.run.losses)
    pairs = [(losses[step - 1], losses[step]) for step in after_exchanges(case) if {step - 1, step} <= losses.keys()]
    pairs = [(before, after) for before, after in pairs if math.isfinite(after - before)]
    late = pairs[len(pairs) // 2 :]
    if len(late) < SAMPLES:
        return None
    rises = [after - before for before, after in late]
    found = Rise(statistics.fmean(rises), statistics.median(before for before, _ in late), len(rises))
    # The noise of all losses would be too large an estimate, since it includes the fall of the loss after each
    # exchange.
    error = statistics.stdev(rises) / math.sqrt(len(rises))
    least = max(case.limits.rise * found.before, case.limits.sigmas * error)
    return found if found.mean >= least else None
