"""Pictures of the benchmarks, drawn with matplotlib."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.policy.alpha_beta import AlphaBeta
from deepspeed_compress.tools.bench.document import Row
from deepspeed_compress.tools.bench.step_table import same_work, title
from deepspeed_compress.tools.bench.workload import stage_of

__all__ = ["check_plotting", "plot_comm", "plot_kernels", "plot_steps"]

COLOURS = ("#0b5394", "#e69138", "#38761d", "#a61c00", "#674ea7", "#76a5af", "#b45f06")
BAR, GAP = 0.22, 0.35
"""Inches: height of a bar, and the space between two methods."""
WIDTH = 9.0


def check_plotting() -> None:
    """Raises UnsupportedError when matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError("--plot needs matplotlib; write: pip install 'deepspeed-compress[plot]'")


def plot_steps(rows: Sequence[Row], file: Path) -> None:
    """Bars of the ratio to compute alone, a method a group of bars, a rate a colour; one chart for every workload."""
    charts = [[row for row in rows if same_work(row) == work] for work in dict.fromkeys(map(same_work, rows))]
    series = [_ratios(chart) for chart in charts]
    _draw_charts([title(chart[0]) for chart in charts], series, "step time / compute alone (1 = a free network)", file)


def plot_kernels(rows: Sequence[Row], heading: str, file: Path) -> None:
    """Bars of GB/s, an operation a group of bars, an implementation a colour."""
    series: dict[str, dict[str, float]] = {}
    for row in rows:
        series.setdefault(row["implementation"], {})[row["operation"]] = row["gb_per_s"]
    _draw_charts([heading], [series], "GB/s of fp32 input", file)


def _ratios(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By rate and method."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        stage = stage_of(row["contender"]["ds_config"])
        name = row["contender"]["name"]
        label = name if stage is None or f"zero{stage}" in name else f"{name}, ZeRO {stage}"
        found.setdefault(row["rate"] or "this network", {})[label] = row["of_compute_only"]
    return found


def _draw_charts(titles: Sequence[str], charts: Sequence[dict[str, dict[str, float]]], axis: str, file: Path) -> None:
    from matplotlib.figure import Figure

    heights = [len(_names(chart)) * (len(chart) * BAR + GAP) + 1.0 for chart in charts]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(len(charts), 1, height_ratios=heights)
    for place, (heading, chart) in enumerate(zip(titles, charts, strict=True)):
        _draw_bars(figure.add_subplot(grid[place, 0]), heading, chart, axis)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _names(chart: dict[str, dict[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for series in chart.values() for name in series))


def _draw_bars(axes: Any, heading: str, chart: dict[str, dict[str, float]], axis: str) -> None:
    """Horizontal groups of bars with their values, on a logarithmic axis where they differ much."""
    names, values = _names(chart), [value for series in chart.values() for value in series.values()]
    height, group = BAR, len(chart) * BAR + GAP
    for index, (label, series) in enumerate(chart.items()):
        places = [names.index(name) * group + index * height for name in series]
        bars = axes.barh(places, list(series.values()), 0.9 * height, color=COLOURS[index % len(COLOURS)], label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    if max(values) > 8 * min(values):
        _count_in_decades(axes, 0.9 * min(1.0, *values), 1.7 * max(values))
    else:
        axes.set_xlim(0, 1.15 * max(values))
    middle = (len(chart) - 1) * height / 2
    axes.set_yticks([place * group + middle for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel(axis, fontsize=9)
    _dress(axes, heading)


def _count_in_decades(axes: Any, low: float, high: float) -> None:
    """A logarithmic axis with plain numbers."""
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    marks = [digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5)]
    shown = [mark for mark in marks if low <= mark <= high]
    axes.set_xticks(shown, [f"{mark:g}" for mark in shown])
    axes.set_xticks([], minor=True)


def plot_comm(rows: Sequence[Row], heading: str, file: Path) -> None:
    """Time against size with the fitted lines, a rate a chart, a collective a colour."""
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(row["rate"] for row in rows))
    figure = Figure(figsize=(WIDTH, 4.5 * len(rates)), layout="constrained", facecolor="white")
    for place, rate in enumerate(rates, 1):
        axes = figure.add_subplot(len(rates), 1, place)
        for index, row in enumerate(row for row in rows if row["rate"] == rate):
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(row["sizes"], row["seconds"], "o", color=colour, label=row["collective"], markersize=4)
            line = AlphaBeta(**row["fit"])
            axes.plot(row["sizes"], [line.seconds(size) for size in row["sizes"]], color=colour, linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("bytes of the whole buffer of a rank", fontsize=9)
        axes.set_ylabel("seconds", fontsize=9)
        _dress(axes, f"{heading}{f' at {rate}' if rate else ''}")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)


def _dress(axes: Any, heading: str) -> None:
    axes.set_title(heading, fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)
    axes.grid(color="#eaeef2")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
