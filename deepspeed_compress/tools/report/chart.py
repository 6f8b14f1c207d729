"""A chart as SVG, its legend beside it, and the figures that the page's script shows under the pointer."""

import html
import json
from typing import Any

from deepspeed_compress.tools.report.panels import Chart, Line
from deepspeed_compress.tools.report.scale import Scale, number, step_scale, value_scale

__all__ = ["draw_chart"]

WIDTH, HEIGHT = 360, 214
LEFT, RIGHT, TOP, BOTTOM = 44.0, 352.0, 14.0, 182.0
"""Of the plot, in units of the view box, about a pixel each."""


def draw_chart(chart: Chart) -> str:
    """A <figure> of HTML."""
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
        f'<text x="{LEFT - 6}" y="{_y(tick, up) + 3.8:.2f}" text-anchor="end">{number(tick)}</text>'
        for tick in up.ticks
    )
    columns = "".join(
        f'<text x="{_x(tick, across)}" y="{BOTTOM + 14}" text-anchor="middle">{number(tick)}</text>'
        for tick in across.ticks
    )
    axis = f'<line class="axis" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>'
    title = f'<text x="{RIGHT}" y="{HEIGHT - 3}" text-anchor="end">optimizer step</text>'
    return rows + columns + axis + title


def _path(line: Line, across: Scale, up: Scale) -> str:
    points = [f"{_x(step, across)} {_y(value, up)}" for step, value in zip(line.steps, line.values, strict=True)]
    # A single point is a line without length, which a round cap makes visible.
    outline = f"M{' '.join(points)}" + ("h0" if len(points) == 1 else "")
    return f'<path class="{_classes(line)}" style="stroke:var(--{line.colour})" d="{outline}"/>'


def _classes(line: Line) -> str:
    return " ".join(["line", *(name for name in ("faint", "dashed", "wide") if getattr(line, name))])


def _marks(chart: Chart, across: Scale) -> str:
    return "".join(
        f'<g class="mark" style="--colour:var(--{mark.symbol.colour})" '
        f'transform="translate({_x(mark.step, across)} {TOP - 6})"><title>{html.escape(mark.text)}</title>'
        f'<path class="hair" d="M0 5V{BOTTOM - TOP + 6}"/><path d="{mark.symbol.outline}"/></g>'
        for mark in chart.marks
    )


def _legend(chart: Chart) -> str:
    lines = {line.name: line for line in sorted(chart.lines, key=lambda line: not line.faint)}
    swatches = [
        (f'<path class="{_classes(line)}" style="stroke:var(--{line.colour})" d="M1 6H15"/>', name)
        for name, line in lines.items()
    ]
    symbols = {mark.symbol.title: mark.symbol for mark in chart.marks}
    swatches += [
        (f'<path style="fill:var(--{symbol.colour})" transform="translate(8 6)" d="{symbol.outline}"/>', title)
        for title, symbol in symbols.items()
    ]
    items = (
        f'<li><svg class="swatch" viewBox="0 0 16 12" aria-hidden="true">{shape}</svg>{html.escape(name)}</li>'
        for shape, name in swatches
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _data(chart: Chart, across: Scale) -> dict[str, Any]:
    """What the script needs to show figures: where the plot begins and ends, in steps and in shares of the width."""
    lines = [
        {
            "name": line.name + (" (training)" if line.faint else ""),
            "steps": line.steps,
            "values": [number(value) for value in line.values],
        }
        for line in chart.lines
    ]
    return {"low": across.low, "high": across.high, "left": LEFT / WIDTH, "right": RIGHT / WIDTH, "lines": lines}
