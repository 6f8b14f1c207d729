"""Shared plotting helpers: the check for matplotlib, a common style of axes, and labels that do not overlap."""

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import UnsupportedError, install_command

INSTALL = install_command("plot")
COLOURS = ("#0b5394", "#e69138", "#38761d", "#a61c00", "#674ea7", "#76a5af", "#b45f06")
GREY, GRID = "#8c959f", "#eaeef2"
BAR, GAP = 0.22, 0.35
"""Height of a bar and space between two groups, in inches."""
WIDTH = 9.0


def can_plot() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_plotting(option: str, file: Path | None = None) -> None:
    """Check that `option` can draw a picture, into `file` if one is given.

    Raises:
        UnsupportedError: matplotlib is missing, or does not support the type of `file`.
    """
    if not can_plot():
        raise UnsupportedError(f"{option} needs matplotlib; write: {INSTALL}")
    from matplotlib.backend_bases import FigureCanvasBase

    if file is not None and file.suffix.removeprefix(".").lower() not in FigureCanvasBase.filetypes:
        kinds = ", ".join(sorted(f".{kind}" for kind in FigureCanvasBase.filetypes))
        raise UnsupportedError(
            f"{option} {file}: is not a picture file (allowed: {kinds}); write {file.with_suffix('.png')}"
        )


def new_figure(width: float, height: float) -> Any:
    """Return a figure of this size in inches on white paper. Axes and labels are kept from overlapping."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    # Labels are placed with the canvas before the figure is written.
    FigureCanvasAgg(figure)
    return figure


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


@dataclass(frozen=True)
class Label:
    """Label `text` of the data point (`x`, `y`)."""

    text: str
    x: float
    y: float


def label_points(axes: Any, labels: Sequence[Label], fontsize: float = 8) -> None:
    """Write each label at the nearest free place, joined to its point by a thin line.

    Places are tried in growing circles. Earlier labels and all points count as occupied. The axes must have their final
    limits and position, so the figure must have been drawn once.
    """
    from matplotlib.transforms import Bbox

    renderer, pixels = axes.figure.canvas.get_renderer(), axes.figure.dpi / 72
    centres = [tuple(axes.transData.transform((label.x, label.y))) for label in labels]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in centres]
    line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
    for label, centre in zip(labels, centres, strict=True):
        text = axes.annotate(
            label.text, (label.x, label.y), (0, 0), textcoords="offset points", fontsize=fontsize, arrowprops=line
        )
        text.set_in_layout(False)
        size = text.get_window_extent(renderer)
        box = _free_place(centre, (size.width, size.height), taken, axes.get_window_extent())
        text.set_position(((box.x0 - centre[0]) / pixels, (box.y0 - centre[1]) / pixels))
        taken.append(box)


def _free_place(centre: tuple[float, ...], size: tuple[float, float], taken: Sequence[Any], frame: Any) -> Any:
    """Return the first place around `centre` that is inside `frame` and overlaps nothing, or else the nearest place."""
    places = list(_places(centre, size))
    inside = (box for box in places if frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 <= frame.y1)
    return next((box for box in inside if not any(box.overlaps(other) for other in taken)), places[0])


def _places(centre: tuple[float, ...], size: tuple[float, float]) -> Iterator[Any]:
    from matplotlib.transforms import Bbox

    (x, y), (width, height) = centre, size
    for distance, angle in product(range(8, 200, 6), range(0, 360, 30)):
        dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        # The distance is measured to the label's edge, not to its center.
        left = x + distance * dx + width * (dx - 1) / 2
        yield Bbox.from_bounds(left, y + distance * dy + height * (dy - 1) / 2, width, height)
