"""Loss against bits, every point with its name: one panel for each kind of setting."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import SymmetricalLogLocator
from matplotlib.transforms import Bbox

__all__ = ["Point", "draw", "front"]

ACCENT, GREY, INK, GRID = "#1f6feb", "#8c959f", "#1f2328", "#eaeef2"
LINEAR = 1.0
"""Per cent up to which the axis of the gap is linear; logarithmic beyond, as some gaps are a hundred times others."""


@dataclass(frozen=True)
class Point:
    """`bits` of an element and step; `gap` of the loss to the baseline's in per cent, and its `spread` over seeds."""

    name: str
    bits: float
    gap: float
    spread: float


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both bits and gap (the Pareto front), fewest bits first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bits, point.gap)):
        if not best or point.gap < best[-1].gap:
            best.append(point)
    return best


def draw(panels: Mapping[str, Sequence[Point]], files: Sequence[Path]) -> None:
    """Write the picture to each of `files`, by its suffix; points without a finite gap are named in it."""
    shown = {title: [p for p in points if math.isfinite(p.gap)] for title, points in panels.items()}
    shown = {title: points for title, points in shown.items() if points}
    figure = Figure(figsize=(8 * max(1, len(shown)), 8.5), facecolor="white")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(1, max(1, len(shown)), squeeze=False, sharey=True)[0]
    for one, (title, points) in zip(axes, shown.items(), strict=False):
        _draw_panel(one, title, points)
    missing = [p.name for points in panels.values() for p in points if not math.isfinite(p.gap)]
    if missing:
        figure.text(0.01, 0.01, f"no finite gap: {', '.join(missing)}", fontsize=9, color=INK)
    figure.tight_layout(rect=(0, 0.03 if missing else 0, 1, 1))
    canvas.draw()  # type: ignore[no-untyped-call]
    for one, points in zip(axes, shown.values(), strict=False):
        _label(one, points, canvas.get_renderer())  # type: ignore[no-untyped-call]
    for file in files:
        figure.savefig(file, dpi=120)


def _draw_panel(axes: Any, title: str, points: Sequence[Point]) -> None:
    best = front(points)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.plot(
        [p.bits for p in best],
        [p.gap for p in best],
        color=ACCENT,
        alpha=0.35,
        drawstyle="steps-post",
        label="Pareto front",
    )
    for point in points:
        colour = ACCENT if point in best else GREY
        axes.errorbar(point.bits, point.gap, point.spread or None, fmt="o", color=colour, markersize=5, elinewidth=0.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=1.2)
    axes.margins(0.12, 0.08)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=LINEAR, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g} %" if value else "0")
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    axes.set_xlabel("bits of a parameter and step")
    axes.tick_params(labelleft=True)
    axes.set_ylabel("held-out loss above uncompressed (logarithmic beyond 1 %)")
    axes.legend(frameon=False, loc="upper right")
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Any, points: Sequence[Point], renderer: Any) -> None:
    """Write each name at the nearest free place, joined to its point by a thin line.

    Places are tried in growing circles; what is taken are the labels so far and all points, in pixels.
    """
    points_a_pixel = 72 / axes.figure.dpi
    centres = [tuple(axes.transData.transform((point.bits, point.gap))) for point in points]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in centres]
    for point, centre in zip(points, centres, strict=True):
        text = axes.annotate(
            point.name,
            (point.bits, point.gap),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=9,
            color=INK,
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
        )
        size = text.get_window_extent(renderer)
        box = _free_place(centre, (size.width, size.height), taken, axes.get_window_extent())
        text.set_position(((box.x0 - centre[0]) * points_a_pixel, (box.y0 - centre[1]) * points_a_pixel))
        taken.append(box)


def _free_place(centre: tuple[float, ...], size: tuple[float, float], taken: Sequence[Bbox], frame: Bbox) -> Bbox:
    """The first place around `centre` that lies in `frame` and overlaps nothing; the nearest one if there is none."""
    places = list(_places(centre, size))
    inside = (box for box in places if frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 <= frame.y1)
    return next((box for box in inside if not any(box.overlaps(other) for other in taken)), places[0])


def _places(centre: tuple[float, ...], size: tuple[float, float]) -> Iterator[Bbox]:
    (x, y), (width, height) = centre, size
    for distance, angle in product(range(8, 200, 6), range(0, 360, 30)):
        dx, dy = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        # The label's edge, not its middle, keeps the distance.
        left = x + distance * dx + width * (dx - 1) / 2
        yield Bbox.from_bounds(left, y + distance * dy + height * (dy - 1) / 2, width, height)
