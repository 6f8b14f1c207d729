"""Loss gap against step time and against bytes, as a PNG and as a page."""

import html
import importlib.util
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.tools.tune.space import BASELINE
from deepspeed_compress.tools.tune.summary import HEAD, Row, Summary, cells, conclusion

__all__ = ["can_draw", "draw"]

BEST, OTHER, GREY = "#1f6feb", "#57606a", "#afb8c1"


@dataclass(frozen=True)
class Axis:
    """What is drawn from left to right: smaller is better."""

    title: str
    of: Callable[[Row], float]


AXES = (
    Axis("step time, of uncompressed training in the same rung", lambda row: 1 / row.speed),
    Axis("sent by one rank in a step, MB", lambda row: row.result.bytes / 1e6),
)
GAP = "loss gap to uncompressed training, %"


def can_draw() -> bool:
    """Whether the plotting package is there."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(summary: Summary, directory: Path) -> None:
    """Write pareto.png and pareto.html into `directory`: one point for each candidate, in the longest of its trials."""
    rows = [row for row in summary.rows if math.isfinite(row.gap) and row.result.bytes > 0]
    figure = _figure(rows, summary)
    figure.savefig(directory / "pareto.png", dpi=120)
    (directory / "pareto.html").write_text(_page(summary, figure), encoding="utf-8")


def _colour(row: Row, summary: Summary) -> str:
    return BEST if row.name == summary.chosen.name else OTHER if row.name == BASELINE else GREY


def _limits(rows: Sequence[Row], target: float) -> tuple[float, float]:
    """Of the gaps in percent, with room around them, and the target among them."""
    gaps = [100 * row.gap for row in rows] + [0.0, 100 * target]
    room = 0.12 * (max(gaps) - min(gaps))
    return min(gaps) - room, max(gaps) + room


def _figure(rows: Sequence[Row], summary: Summary) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained", facecolor="white")
    for axis, axes in zip(AXES, figure.subplots(1, 2, sharey=True), strict=True):
        _draw_axes(axes, axis, rows, summary)
    figure.axes[0].set_ylabel(GAP, fontsize=9)
    # Names find their places where points will be.
    figure.draw_without_rendering()
    for axis, axes in zip(AXES, figure.axes, strict=True):
        _label(axes, axis, rows)
    return figure


def _draw_axes(axes: Any, axis: Axis, rows: Sequence[Row], summary: Summary) -> None:
    target = 100 * summary.aim.target
    axes.axhline(target, color=BEST, linewidth=0.8, linestyle="--")
    for row in rows:
        axes.scatter(axis.of(row), 100 * row.gap, s=18 + 14 * row.rung, color=_colour(row, summary), zorder=3)
    axes.margins(x=0.18)
    if rows and max(map(axis.of, rows)) > 8 * min(map(axis.of, rows)):
        _count_in_decades(axes)
    axes.set_ylim(*_limits(rows, summary.aim.target))
    axes.set_xlabel(axis.title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)
    axes.grid(color="#eaeef2")
    axes.spines[["top", "right"]].set_visible(False)


def _count_in_decades(axes: Any) -> None:
    """A logarithmic axis with plain numbers."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    marks = [digit * 10.0**power for power in range(-9, 7) for digit in (1, 2, 5)]
    shown = [mark for mark in marks if low <= mark <= high]
    axes.set_xticks(shown, [f"{mark:g}" for mark in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlim(low, high)


def _label(axes: Any, axis: Axis, rows: Sequence[Row]) -> None:
    """Names beside their points, each at the first place where it covers neither a point nor another name."""
    figure = axes.figure
    scale = figure.dpi / 72
    points = {row.name: axes.transData.transform((axis.of(row), 100 * row.gap)) / scale for row in rows}
    taken = [Box(x - 4, y - 4, x + 4, y + 4) for x, y in points.values()]
    right, left = axes.bbox.x1 / scale, axes.bbox.x0 / scale
    for row in sorted(rows, key=lambda row: row.gap):
        boxes = {place: _box(points[row.name], row.name, place) for place in PLACES}
        free = (place for place, box in boxes.items() if left < box.x0 and box.x1 < right and not box.covers(taken))
        place = next(free, PLACES[0])
        taken.append(boxes[place])
        line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkB": 3} if abs(place[1]) > NEAR else None
        at, side = (axis.of(row), 100 * row.gap), "left" if place[0] > 0 else "right"
        texts = {"textcoords": "offset points", "fontsize": SIZE, "ha": side, "va": "center"}
        axes.annotate(row.name, at, place, arrowprops=line, **texts).set_in_layout(False)


SIZE, NEAR = 8, 8
PLACES = tuple((x, y) for y in (0, 8, -8, 19, -19, 30, -30, 41, 52) for x in (7, -7))
"""Of the middle of a name, in points from its own point: to the right or to the left of it, near before far."""


@dataclass(frozen=True)
class Box:
    """A rectangle in points."""

    x0: float
    y0: float
    x1: float
    y1: float

    def covers(self, others: Sequence["Box"]) -> bool:
        """Whether it covers a part of any of the others."""
        return any(
            self.x0 < other.x1 and other.x0 < self.x1 and self.y0 < other.y1 and other.y0 < self.y1 for other in others
        )


def _box(point: Sequence[float], text: str, place: tuple[int, int]) -> Box:
    """Where `text` comes to stand, a character being about 0.62 of its size wide."""
    width, (x, y) = 0.62 * SIZE * len(text), (point[0] + place[0], point[1] + place[1])
    begin = x if place[0] > 0 else x - width
    return Box(begin, y - 0.6 * SIZE, begin + width, y + 0.6 * SIZE)


def _page(summary: Summary, figure: Any) -> str:
    """The picture, the conclusion and the table as one page that needs no other file."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    picture = drawn.getvalue()
    head, *body = [HEAD, *map(cells, summary.rows)]
    rows = [_tags(head, "th"), *(_tags(row, "td") for row in body)]
    said = "".join(f"<p>{html.escape(line)}</p>" for line in conclusion(summary))
    return PAGE.format(picture=picture[picture.index("<svg") :], said=said, rows="\n".join(rows))


def _tags(texts: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tuning</title><style>
body {{ margin: 0 auto; padding: 1.2rem; max-width: 72rem; font: 1rem/1.45 system-ui, sans-serif; color: #1f2328; }}
svg {{ width: 100%; height: auto; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }}
th, td {{ padding: .3rem .7rem; text-align: left; white-space: nowrap; border-bottom: 1px solid #d8dee4; }}
</style></head><body>
<h1>Tuning</h1>
{said}
{picture}
<div><table>
{rows}
</table></div>
</body></html>
"""
