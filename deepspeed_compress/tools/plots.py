"""Shared plotting helpers: the check for matplotlib, a common style of axes, and bars."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import UnsupportedError, install_command

COLOURS = ("#0b5394", "#e69138", "#38761d", "#a61c00", "#674ea7", "#76a5af", "#b45f06")
GREY, GRID = "#8c959f", "#eaeef2"
BAR, GAP = 0.22, 0.35
"""Height of a bar and space between two groups, in inches."""
WIDTH = 9.0


def check_plotting(option: str, file: Path | None = None) -> None:
    """Check that `option` can draw a picture, into `file` if one is given.

    Raises:
        UnsupportedError: matplotlib is missing, or does not support the type of `file`.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(f"{option} needs matplotlib; write: {install_command('plot')}")
    from matplotlib.backend_bases import FigureCanvasBase

    if file is not None and file.suffix.removeprefix(".").lower() not in FigureCanvasBase.filetypes:
        kinds = ", ".join(sorted(f".{kind}" for kind in FigureCanvasBase.filetypes))
        raise UnsupportedError(
            f"{option} {file}: is not a picture file (allowed: {kinds}); write {file.with_suffix('.png')}"
        )


def new_figure(width: float, height: float) -> Any:
    """Return a figure of this size in inches on white paper. Axes and labels are kept from overlapping."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save_figure(figure: Any, file: Path) -> Path:
    """Write `figure` to `file`, whose directory is created if necessary. Return `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    return file


def style_axes(axes: Any, title: str = "", grid: str | None = GRID) -> None:
    """Style axes: title on the left, small ticks, pale grid (None for no grid), no frame.

    A legend is added if anything has a label.
    """
    if title:
        axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)
    if grid is not None:
        axes.grid(color=grid, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)


def plain_decades(axes: Any, limits: tuple[float, float] | None = None) -> None:
    """Make the horizontal axis logarithmic with plain numbers, over `limits` or its own limits if None."""
    axes.set_xscale("log")
    low, high = limits or axes.get_xlim()
    marks = [digit * 10.0**power for power in range(-9, 7) for digit in (1, 2, 5)]
    inside = [mark for mark in marks if low <= mark <= high]
    axes.set_xticks(inside, [f"{mark:g}" for mark in inside])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)


BarChart = Mapping[str, Mapping[str, float]]
"""Values by series, each of which has a color, and by group of bars."""


def plot_bars(charts: Sequence[tuple[str, BarChart]], axis: str, file: Path) -> None:
    """Draw titled charts of horizontal bars with their values, one below another, into the PNG `file`."""
    heights = [len(_groups(chart)) * (len(chart) * BAR + GAP) + 1.0 for _, chart in charts]
    figure = new_figure(WIDTH, sum(heights))
    grid = figure.add_gridspec(len(charts), 1, height_ratios=heights)
    for place, (title, chart) in enumerate(charts):
        _draw_bars(figure.add_subplot(grid[place, 0]), title, chart, axis)
    save_figure(figure, file)


def _groups(chart: BarChart) -> list[str]:
    return list(dict.fromkeys(name for series in chart.values() for name in series))


def _draw_bars(axes: Any, title: str, chart: BarChart, axis: str) -> None:
    """Draw bars, on a logarithmic axis if the values differ greatly."""
    names, values = _groups(chart), [value for series in chart.values() for value in series.values()]
    step = len(chart) * BAR + GAP
    for index, (label, series) in enumerate(chart.items()):
        places = [names.index(name) * step + index * BAR for name in series]
        bars = axes.barh(places, list(series.values()), 0.9 * BAR, color=COLOURS[index % len(COLOURS)], label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    if max(values) > 8 * min(values):
        plain_decades(axes, (0.9 * min(1.0, *values), 1.7 * max(values)))
    else:
        axes.set_xlim(0, 1.15 * max(values))
    middle = (len(chart) - 1) * BAR / 2
    axes.set_yticks([place * step + middle for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel(axis, fontsize=9)
    style_axes(axes, title)
