"""HTML page of a report: figures, charts, settings, events and configuration of each run. It needs no other file."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.config import masked
from deepspeed_compress.config.numbers import short
from deepspeed_compress.tools.report.figures import table_head, table_rows, tiles
from deepspeed_compress.tools.report.panels import Bars, Chart, Line, bars, charts, missing
from deepspeed_compress.tools.report.runs import (
    EVENT_HEAD,
    SHOWN,
    Run,
    SettingsTimeline,
    event_rows,
    setting_colours,
    settings_timelines,
    steps_by_setting,
)

_escape = html.escape

_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
{style}</style></head><body>
<header><h1>{title}</h1>{status}</header>
{sections}
<script>
{script}</script></body></html>
"""


def page(runs: Sequence[Run]) -> str:
    """Return the HTML page of a report on `runs`: the baseline, if any, and the run."""
    found, settings = [*runs], settings_timelines(runs)
    sections = [
        _tiles(found),
        _section("Over the steps", "charts", [svg_chart(chart) for chart in charts(found)]),
        _section("In a step", "charts bars", [_bars(bar) for bar in bars(found)]),
        _section("Settings in force", "settings", _timelines(settings)),
        *(_events(run) for run in runs if run.events),
        _section("Final figures", "wide figures", [_table(table_head(found), table_rows(found))]),
        _missing(missing(found)),
        _section("Made with", "made", [detail for run in runs for detail in _details(run)]),
    ]
    style, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return _PAGE.format(
        title=_escape(" against ".join(run.name for run in reversed(runs))),
        style=style,
        script=script,
        status=_status(runs),
        sections="\n".join(filter(None, sections)),
    )


def _section(title: str, classes: str, parts: Sequence[str]) -> str:
    return f'<section><h2>{title}</h2><div class="{classes}">{"".join(parts)}</div></section>' if parts else ""


def _status(runs: Sequence[Run]) -> str:
    items = (
        f'<li style="--colour:var(--{run.role})">{_escape(run.name)}: {_escape(run.status)}</li>'
        for run in reversed(runs)
    )
    return f'<ul class="status">{"".join(items)}</ul>'


def _tiles(runs: list[Run]) -> str:
    parts = (
        f'<div class="tile"><span>{_escape(title)}</span><strong>{_escape(value)}</strong>'
        f"<small>{_escape(more)}</small></div>"
        for title, value, more in tiles(runs)
    )
    return f'<div class="tiles">{"".join(parts)}</div>'


def _bars(shown: Bars) -> str:
    totals = [sum(values[index] for _, _, values in shown.parts) for index in range(len(shown.runs))]
    rows = []
    for index, name in enumerate(shown.runs):
        parts = (
            _part(values[index] / (max(totals) or 1.0), colour, f"{title}: {values[index]:,.4g} {shown.unit}")
            for title, colour, values in shown.parts
        )
        rows.append(_bar(name, "parts", parts, f"{totals[index]:,.4g} {shown.unit}"))
    swatches = _colour_legend((title, colour) for title, colour, _ in shown.parts)
    return (
        f"<figure><figcaption><h3>{_escape(shown.title)}</h3>{swatches}</figcaption><div>{''.join(rows)}</div></figure>"
    )


def _bar(name: str, classes: str, parts: Iterable[str], end: str) -> str:
    name = _escape(name)
    inside = f'<span title="{name}">{name}</span><div class="{classes}">{"".join(parts)}</div><span>{end}</span>'
    return f'<div class="bar">{inside}</div>'


def _part(share: float, colour: str, title: str) -> str:
    return f'<i style="--colour:var(--{colour});flex:0 0 {100 * share:.3f}%" title="{_escape(title)}"></i>'


def _colour_legend(entries: Iterable[tuple[str, str]]) -> str:
    shape = '<rect y="1" width="16" height="10" rx="2" style="fill:var(--{})"/>'
    return legend((shape.format(colour), title) for title, colour in entries)


def _timelines(shown: Sequence[SettingsTimeline]) -> list[str]:
    colours, last = setting_colours(shown), max([1, *(timeline.intervals[-1].last for timeline in shown)])
    parts = "".join(_timeline(timeline, colours, last) for timeline in shown)
    return [f"<figure><div>{parts}</div></figure>"] if parts else []


def _timeline(timeline: SettingsTimeline, colours: Mapping[str, str], last: int) -> str:
    # The exact step of a change between two measured steps is unknown. Draw it at the first one that has the new
    # setting.
    begins = [1, *(interval.first for interval in timeline.intervals[1:])]
    ends = [*begins[1:], timeline.intervals[-1].last + 1]
    pieces = (
        _part((end - begin) / last, colours[interval.setting], f"{interval.setting}: steps {begin} to {end - 1}")
        for interval, begin, end in zip(timeline.intervals, begins, ends, strict=True)
    )
    swatches = _colour_legend(
        (f"{setting}: {steps}", colours[setting]) for setting, steps in steps_by_setting(timeline).items()
    )
    return _bar(timeline.run, "parts strip", pieces, f"{last:,} steps") + swatches


def _events(run: Run) -> str:
    left = len(run.events) - SHOWN
    note = f"<p>The last {SHOWN} of {len(run.events):,} events.</p>" if left > 0 else ""
    title = f"Events of {_escape(run.name)}"
    return _section(title, "wide events", [note + _table(EVENT_HEAD, event_rows(run))])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of plain texts as HTML."""
    body = "".join(_cells(row, "td") for row in rows)
    return f"<table><thead>{_cells(head, 'th')}</thead><tbody>{body}</tbody></table>"


def _cells(cells: Sequence[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{_escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _missing(parts: Mapping[str, str]) -> str:
    names = "; ".join(f"{title} (needs {source})" for title, source in parts.items())
    return f'<p class="missing">Left out, because no file has the data: {_escape(names)}.</p>' if names else ""


def _details(run: Run) -> Iterable[str]:
    """Yield the configuration of a run, as HTML."""
    summary, name = run.files.summary or {}, _escape(run.name)
    if summary:
        config, model, seed = (summary.get(key) for key in ("config", "model", "seed"))
        yield f"<p>{name}: {_escape(f'{config}, {model}, seed {seed}')}</p>"
    if run.files.ds_config:
        text = _escape(json.dumps(masked(run.files.ds_config), indent=2))
        yield f"<details><summary>{name}: configuration</summary><pre>{text}</pre></details>"


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
