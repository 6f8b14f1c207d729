"""Charts and their axes, drawn as SVG for the page and with matplotlib for the picture."""

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.config.numbers import short
from deepspeed_compress.tools.plots import new_figure, save_figure, style_axes
from deepspeed_compress.tools.report.figures import table_head, table_rows
from deepspeed_compress.tools.report.panels import Bars, Chart, Line, bars, charts
from deepspeed_compress.tools.report.runs import Run
from deepspeed_compress.tools.report.style import light


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


COLUMNS = 3
PANEL = (4.4, 3.1)
"""Width and height of a panel in inches."""


def draw_picture(runs: Sequence[Run], file: Path) -> None:
    """Write the charts and the table of `runs` to the PNG `file`."""
    from matplotlib import rc_context

    # Keep matplotlib from parsing "$" in names as formulas.
    with rc_context({"text.parse_math": False}):
        _draw(runs, file)


def _draw(runs: Sequence[Run], file: Path) -> None:
    found = [*runs]
    panels: list[Chart | Bars] = [*charts(found), *bars(found)]
    columns, rows = min(COLUMNS, len(panels)), -(-len(panels) // COLUMNS)
    heights = [*[PANEL[1]] * rows, 0.26 * (len(table_rows(found)) + 1)]
    figure = new_figure(PANEL[0] * max(2, columns), sum(heights))
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=heights)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(index, columns)])
        if isinstance(panel, Chart):
            _draw_chart(axes, panel)
        else:
            _draw_bars(axes, panel)
    _draw_table(figure.add_subplot(grid[rows, :]), found)
    save_figure(figure, file)


def _draw_chart(axes: Any, chart: Chart) -> None:
    for line in chart.lines:
        _draw_line(axes, line)
    scale = value_scale(chart)
    if chart.decades:
        axes.set_yscale("log")
    axes.set_ylim(scale.low, scale.high)
    axes.set_xlim(chart.first - 0.02 * (chart.last - chart.first) - 0.5, chart.last + 0.5)
    upwards = axes.get_xaxis_transform()
    for mark in chart.markers:
        axes.axvline(mark.step, color=light(mark.symbol.colour), alpha=0.3, linewidth=0.8)
        axes.plot(mark.step, 0.97, mark.symbol.marker, color=light(mark.symbol.colour), markersize=5, transform=upwards)
    axes.set_xlabel("optimizer step", fontsize=8)
    style_axes(axes, chart.title, light("rule"))


def _draw_line(axes: Any, line: Line) -> None:
    axes.plot(
        line.steps,
        line.values,
        color=light(line.colour),
        label=None if line.faint else line.name,
        alpha=0.38 if line.faint else 1.0,
        linewidth=3.0 if line.wide else 1.6,
        linestyle="--" if line.dashed else "-",
        marker="." if len(line.steps) == 1 else None,
    )


def _draw_bars(axes: Any, shown: Bars) -> None:
    left = [0.0] * len(shown.runs)
    for title, colour, values in shown.parts:
        axes.barh(range(len(shown.runs)), values, 0.5, left=left, color=light(colour), label=title)
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.set_yticks(range(len(shown.runs)), shown.runs)
    # Leave room for the legend above the bars.
    axes.set_ylim(-0.6, len(shown.runs) + 0.2 + 0.3 * len(shown.parts))
    style_axes(axes, shown.title, grid=None)


def _draw_table(axes: Any, runs: list[Run]) -> None:
    axes.set_axis_off()
    head, rows = table_head(runs), table_rows(runs)
    table = axes.table(
        cellText=rows, colLabels=head, loc="upper left", cellLoc="right", colLoc="right", edges="horizontal"
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for (row, column), cell in table.get_celld().items():
        cell.set_edgecolor(light("rule"))
        cell.set_text_props(ha="left" if column == 0 else "right", weight="bold" if row == 0 else "normal")
