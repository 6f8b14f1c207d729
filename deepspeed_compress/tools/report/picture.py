"""The picture of a report, drawn with matplotlib: the charts of the page, the bars, and the table of figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_compress.tools.report.figures import table_head, table_rows
from deepspeed_compress.tools.report.palette import light
from deepspeed_compress.tools.report.panels import Bars, Chart, Line, bars, charts
from deepspeed_compress.tools.report.reading import Run
from deepspeed_compress.tools.report.scale import value_scale

__all__ = ["draw"]

COLUMNS = 3
PANEL = (4.4, 3.1)
"""Inches."""


def draw(runs: Sequence[Run], file: Path) -> None:
    """Write the charts and the table of `runs` to the PNG `file`."""
    from matplotlib.figure import Figure

    found = [*runs]
    panels: list[Chart | Bars] = [*charts(found), *bars(found)]
    columns, rows = min(COLUMNS, len(panels)), -(-len(panels) // COLUMNS)
    heights = [*[PANEL[1]] * rows, 0.26 * (len(table_rows(found)) + 1)]
    figure = Figure(figsize=(PANEL[0] * max(2, columns), sum(heights)), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(rows + 1, columns, height_ratios=heights)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(index, columns)])
        if isinstance(panel, Chart):
            _draw_chart(axes, panel)
        else:
            _draw_bars(axes, panel)
    _draw_table(figure.add_subplot(grid[rows, :]), found)
    figure.savefig(file, dpi=110)


def _draw_chart(axes: Any, chart: Chart) -> None:
    for line in chart.lines:
        _draw_line(axes, line)
    scale = value_scale(chart)
    if chart.decades:
        axes.set_yscale("log")
    axes.set_ylim(scale.low, scale.high)
    axes.set_xlim(chart.first - 0.02 * (chart.last - chart.first) - 0.5, chart.last + 0.5)
    upwards = axes.get_xaxis_transform()
    for mark in chart.marks:
        axes.axvline(mark.step, color=light(mark.symbol.colour), alpha=0.3, linewidth=0.8)
        axes.plot(mark.step, 0.97, mark.symbol.marker, color=light(mark.symbol.colour), markersize=5, transform=upwards)
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.grid(color=light("rule"), linewidth=0.6)
    _dress(axes, chart.title)


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
    # Room for the legend above the bars.
    axes.set_ylim(-0.6, len(shown.runs) + 0.2 + 0.3 * len(shown.parts))
    _dress(axes, shown.title)


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)


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
