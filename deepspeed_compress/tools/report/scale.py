"""Axes of a chart: which numbers stand beside it, and how they are written."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_compress.tools.report.panels import Chart

__all__ = ["Scale", "number", "step_scale", "value_scale"]


@dataclass(frozen=True)
class Scale:
    """From `low` to `high`; `ticks` lie between. `decades`: distances are those of logarithms."""

    low: float
    high: float
    ticks: tuple[float, ...]
    decades: bool = False

    def share(self, value: float) -> float:
        """Where `value` lies: 0 at `low`, 1 at `high`."""
        low, high, at = (math.log(x) if self.decades else x for x in (self.low, self.high, value))
        return (at - low) / (high - low)


def number(value: float) -> str:
    """Four digits, thousands and millions as k and M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    return f"{value:.4g}"


def step_scale(chart: Chart) -> Scale:
    """Of the optimizer steps; a run of a single step has some room, too."""
    low, high = chart.first, max(chart.last, chart.first + 1)
    return Scale(low, high, tuple(tick for tick in _between(low, high, 5) if tick == int(tick)))


def value_scale(chart: Chart) -> Scale:
    """With room around the lines, and from zero where the chart says so."""
    values = [value for line in chart.lines for value in line.values]
    low, high = min(values), max(values)
    if chart.decades:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return Scale(
            10.0 ** powers[0], 10.0 ** powers[-1], tuple(10.0**power for power in powers[:: _stride(powers)]), True
        )
    low = min(low, 0.0) if chart.from_zero else low
    room = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    bottom, top = low - (0.0 if chart.from_zero and low == 0 else room), high + room
    return Scale(bottom, top, tuple(_between(bottom, top, 5)))


def _stride(powers: range) -> int:
    return -(-len(powers) // 5)


def _between(low: float, high: float, count: int) -> Iterable[float]:
    """About `count` round numbers from `low` to `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [round(index * size, 12) for index in range(first, last + 1)]
