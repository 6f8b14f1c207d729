"""Charts and their axes, drawn as SVG."""

import html
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config.numbers import short
from deepspeed_compress.tools.report.panels import Chart, Line


@dataclass(frozen=True)
class Scale:
    """Axis from `low` to `high` with `ticks` in between. It is logarithmic if `decades` is set."""

    low: float
    high: float
    ticks: tuple[float, ...]
    decades: bool = False

    def share(self, value: float) -> float:
        """Return the position of `value` on the axis: 0 at `low`, 1 at `high`."""
        low, high, at = (math.log(x) if self.decades else x for x in (self.low, self.high, value))
        return (at - low) / (high - low)


def step_scale(chart: Chart) -> Scale:
    """Return the scale of optimizer steps. It spans at least one step, so that a run of a single step can be drawn."""
    low, high = chart.first, max(chart.last, chart.first + 1)
    return Scale(low, high, tuple(tick for tick in _between(low, high, 5) if tick == int(tick)))


def value_scale(chart: Chart) -> Scale:
    """Return the scale of the values, with a margin around the lines. It includes zero if the chart asks for it."""
    values = [value for line in chart.lines for value in line.values]
    low, high = min(values), max(values)
    if chart.decades:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = tuple(10.0**power for power in powers[:: -(-len(powers) // 5)])
        return Scale(10.0 ** powers[0], 10.0 ** powers[-1], ticks, True)
    low = min(low, 0.0) if chart.from_zero else low
    room = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
    bottom, top = low - (0.0 if chart.from_zero and low == 0 else room), high + room
    return Scale(bottom, top, tuple(_between(bottom, top, 5)))


def _between(low: float, high: float, count: int) -> Iterable[float]:
    """Return about `count` round numbers between `low` and `high`."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.999 * rough)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [round(index * size, 12) for index in range(first, last + 1)]


WIDTH, HEIGHT = 360, 214
LEFT, RIGHT, TOP, BOTTOM = 44.0, 352.0, 14.0, 182.0
"""Edges of the plot in units of the SVG view box, each about a pixel."""


def svg_chart(chart: Chart) -> str:
    """Return the chart as an HTML `<figure>`."""
    across, up = step_scale(chart), value_scale(chart)
    parts = [_grid(across, up), *(_path(line, across, up) for line in chart.lines), _marks(chart, across)]
    drawing = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(chart.title)}">'
        f'{"".join(parts)}<line class="pointer" y1="{TOP}" y2="{BOTTOM}"/></svg>'
    )
    data = html.escape(json.dumps(_data(chart, across)))
    return (
        f'<figure class="chart" data-chart="{data}"><figcaption><h3>{html.escape(chart.title)}</h3>{_legend(chart)}'
        f'</figcaption><div class="plot">{drawing}<output></output></div></figure>'
    )


def _x(step: float, across: Scale) -> float:
    return round(LEFT + (RIGHT - LEFT) * across.share(step), 2)


def _y(value: float, up: Scale) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * up.share(value), 2)


def _grid(across: Scale, up: Scale) -> str:
    rows = "".join(
        f'<line class="rule" x1="{LEFT}" x2="{RIGHT}" y1="{_y(tick, up)}" y2="{_y(tick, up)}"/>'
        f'<text x="{LEFT - 6}" y="{_y(tick, up) + 3.8:.2f}" text-anchor="end">{short(tick)}</text>'
        for tick in up.ticks
    )
    columns = "".join(
        f'<text x="{_x(tick, across)}" y="{BOTTOM + 14}" text-anchor="middle">{short(tick)}</text>'
        for tick in across.ticks
    )
    axis = f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>'
    title = f'<text x="{RIGHT}" y="{HEIGHT - 3}" text-anchor="end">optimizer step</text>'
    return rows + columns + axis + title


def _path(line: Line, across: Scale, up: Scale) -> str:
    points = [f"{_x(step, across)} {_y(value, up)}" for step, value in zip(line.steps, line.values, strict=True)]
    # A single point is a path of length zero. The round line cap makes it visible.
    outline = f"M{' '.join(points)}" + ("h0" if len(points) == 1 else "")
    return f'<path class="{_classes(line)}" style="stroke:var(--{line.colour})" d="{outline}"/>'


def _classes(line: Line) -> str:
    return " ".join(["line", *(name for name in ("faint", "dashed", "wide") if getattr(line, name))])


def _marks(chart: Chart, across: Scale) -> str:
    return "".join(
        f'<g class="mark" style="--colour:var(--{mark.symbol.colour})" '
        f'transform="translate({_x(mark.step, across)} {TOP - 6})"><title>{html.escape(mark.text)}</title>'
        f'<path class="hair" d="M0 5V{BOTTOM - TOP + 6}"/><path d="{mark.symbol.outline}"/></g>'
        for mark in chart.markers
    )


def _legend(chart: Chart) -> str:
    lines = {line.name: line for line in sorted(chart.lines, key=lambda line: not line.faint)}
    swatches = [
        (f'<path class="{_classes(line)}" style="stroke:var(--{line.colour})" d="M1 6H15"/>', name)
        for name, line in lines.items()
    ]
    symbols = {mark.symbol.title: mark.symbol for mark in chart.markers}
    swatches += [
        (f'<path style="fill:var(--{symbol.colour})" transform="translate(8 6)" d="{symbol.outline}"/>', title)
        for title, symbol in symbols.items()
    ]
    return legend(swatches)


def legend(swatches: Iterable[tuple[str, str]]) -> str:
    """Return a legend of shapes (SVG in 16 x 12 units) with their names."""
    items = (
        f'<li><svg class="swatch" viewBox="0 0 16 12" aria-hidden="true">{shape}</svg>{html.escape(name)}</li>'
        for shape, name in swatches
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _data(chart: Chart, across: Scale) -> dict[str, Any]:
    """Return the values for the script that shows figures under the pointer.

    `low` and `high` are the first and last step of the axis. `left` and `right` are its ends as fractions of the width.
    """
    lines = [
        {
            "name": line.name + (" (training)" if line.faint else ""),
            "steps": line.steps,
            "values": [short(value) for value in line.values],
        }
        for line in chart.lines
    ]
    return {"low": across.low, "high": across.high, "left": LEFT / WIDTH, "right": RIGHT / WIDTH, "lines": lines}
