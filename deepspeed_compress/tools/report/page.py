"""HTML page of a report: figures, charts, settings, events and configuration of each run. It needs no other file.

`page.html.jinja` is its template, which includes the style and the script and escapes all values. This module computes
what the template needs besides the panels: positions, widths and legends.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from deepspeed_compress.config import masked
from deepspeed_compress.config.numbers import short
from deepspeed_compress.tools.report.figures import table_head, table_rows, tiles
from deepspeed_compress.tools.report.panels import Bars, Chart, Line, bars, charts, missing
from deepspeed_compress.tools.report.runs import Run, event_rows, setting_colours, settings_timelines, steps_by_setting


def page(runs: Sequence[Run]) -> str:
    """Return the HTML page of a report on `runs`: the baseline, if any, and the run."""
    loader, found = FileSystemLoader(Path(__file__).parent), [*runs]
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters |= {"short": short, "configuration": lambda config: json.dumps(masked(config), indent=2)}
    return environment.get_template("page.html.jinja").render(
        title=" against ".join(run.name for run in reversed(runs)),
        runs=found,
        tiles=tiles(found),
        plots=[Plot(chart, step_scale(chart), value_scale(chart)) for chart in charts(found)],
        bars=[(group.title, [part[:2] for part in group.parts], _bar_rows(group)) for group in bars(found)],
        timelines=_timeline_rows(runs),
        events=[(run.name, len(run.events), event_rows(run)) for run in runs if run.events],
        table_head=table_head(found),
        table_rows=table_rows(found),
        missing=missing(found),
        configured=[run for run in runs if run.files.summary or run.files.ds_config],
    )


@dataclass(frozen=True)
class Row:
    """Bar of a run. `end` is the text after it."""

    name: str
    parts: list[tuple[float, str, str]]
    """Share of the width, color and title of each part."""
    end: str
    legend: Iterable[tuple[str, str]] = ()
    """Titles and colors."""


def _bar_rows(group: Bars) -> list[Row]:
    totals = [sum(values) for values in zip(*(values for _, _, values in group.parts), strict=True)]
    rows = []
    for index, name in enumerate(group.runs):
        parts = [
            (values[index] / (max(totals) or 1.0), colour, f"{title}: {values[index]:,.4g} {group.unit}")
            for title, colour, values in group.parts
        ]
        rows.append(Row(name, parts, f"{totals[index]:,.4g} {group.unit}"))
    return rows


def _timeline_rows(runs: Sequence[Run]) -> list[Row]:
    timelines, rows = settings_timelines(runs), list[Row]()
    colours, last = setting_colours(timelines), max([1, *(timeline[-1].last for timeline in timelines.values())])
    for name, timeline in timelines.items():
        # The exact step of a change between two measured steps is unknown. Draw it at the first one that has the new
        # setting.
        begins = [1, *(interval.first for interval in timeline[1:])]
        ends = [*begins[1:], timeline[-1].last + 1]
        parts = [
            ((end - begin) / last, colours[interval.setting], f"{interval.setting}: steps {begin} to {end - 1}")
            for interval, begin, end in zip(timeline, begins, ends, strict=True)
        ]
        legend = [(f"{setting}: {steps}", colours[setting]) for setting, steps in steps_by_setting(timeline).items()]
        rows.append(Row(name, parts, f"{last:,} steps", legend))
    return rows


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


@dataclass(frozen=True)
class Plot:
    """Chart with its axes. Positions are in units of the SVG view box, each about a pixel."""

    chart: Chart
    across: Scale
    up: Scale
    WIDTH, HEIGHT = 360, 214
    LEFT, RIGHT, TOP, BOTTOM = 44.0, 352.0, 14.0, 182.0
    """Edges of the plot."""

    def x(self, step: float) -> float:
        """Return the position of a step."""
        return round(self.LEFT + (self.RIGHT - self.LEFT) * self.across.share(step), 2)

    def y(self, value: float) -> float:
        """Return the position of a value."""
        return round(self.BOTTOM - (self.BOTTOM - self.TOP) * self.up.share(value), 2)

    def outline(self, line: Line) -> str:
        """Return the SVG path of a line."""
        points = [f"{self.x(step)} {self.y(value)}" for step, value in zip(line.steps, line.values, strict=True)]
        # A single point is a path of length zero. The round line cap makes it visible.
        return f"M{' '.join(points)}" + ("h0" if len(points) == 1 else "")

    @property
    def named_lines(self) -> Iterable[Line]:
        """Return one line for each name in the legend, by preference one that is not faint."""
        return {line.name: line for line in sorted(self.chart.lines, key=lambda line: not line.faint)}.values()

    @property
    def data(self) -> str:
        """Return the values for the script that shows figures under the pointer, as JSON.

        `low` and `high` are the first and last step of the axis. `left` and `right` are its ends as fractions of the
        width.
        """
        lines = [
            {
                "name": line.name + (" (training)" if line.faint else ""),
                "steps": line.steps,
                "values": [short(value) for value in line.values],
            }
            for line in self.chart.lines
        ]
        ends = {"left": self.LEFT / self.WIDTH, "right": self.RIGHT / self.WIDTH}
        return json.dumps({"low": self.across.low, "high": self.across.high, **ends, "lines": lines})
