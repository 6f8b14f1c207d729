"""Plot of loss against bits with labeled points and one panel per kind of setting."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import SymmetricalLogLocator

from deepspeed_compress.tools.plots import Label, label_points, style_axes

__all__ = ["Point", "draw", "front"]

ACCENT, GREY, INK = "#1f6feb", "#8c959f", "#1f2328"
LINEAR = 1.0
"""Gap in percent up to which the axis is linear; larger gaps are on a logarithmic scale."""


@dataclass(frozen=True)
class Point:
    """Bits per element and step, and the gap of the loss to the baseline in percent with its spread over seeds."""

    name: str
    bits: float
    gap: float
    spread: float


def front(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front: the points that no other point beats in both bits and gap, fewest bits first."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: (point.bits, point.gap)):
        if not best or point.gap < best[-1].gap:
            best.append(point)
    return best


def draw(panels: Mapping[str, Sequence[Point]], files: Sequence[Path]) -> None:
    """Write the picture to each of `files`, whose suffix sets the format. It lists points without a finite gap."""
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
        label_points(one, [Label(point.name, point.bits, point.gap) for point in points], fontsize=9)
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
    axes.set_xlabel("bits per parameter and step")
    axes.tick_params(labelleft=True)
    axes.set_ylabel("held-out loss above uncompressed (logarithmic beyond 1 %)")
    style_axes(axes, title)
