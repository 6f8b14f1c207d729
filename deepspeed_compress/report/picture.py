"""The picture of a report, drawn with matplotlib."""

from pathlib import Path
from typing import Any

from deepspeed_compress.report.runs import PANELS, STACK, Kind, Panel, Run, table_head, table_rows, traffic

__all__ = ["draw"]


def draw(runs: list[Run], file: Path) -> None:
    """Write the charts and the table of `runs` to the PNG `file`."""
    from matplotlib.figure import Figure

    kinds, rows = traffic(runs), len(table_rows(runs)) + 1
    columns = len(PANELS) + bool(kinds)
    heights = (4.0, 0.28 * rows)
    figure = Figure(figsize=(13 / 3 * columns, sum(heights)), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, columns, height_ratios=heights)
    for column, panel in enumerate(PANELS):
        _draw_panel(figure.add_subplot(grid[0, column]), panel, runs)
    if kinds:
        _draw_stack(figure.add_subplot(grid[0, -1]), kinds, [run.name for run in runs])
    _draw_table(figure.add_subplot(grid[1, :]), runs)
    figure.savefig(file, dpi=120)


def _draw_stack(axes: Any, kinds: list[tuple[Kind, list[float]]], names: list[str]) -> None:
    bottom = [0.0] * len(names)
    for kind, sizes in kinds:
        axes.bar(range(len(names)), sizes, 0.55, bottom=bottom, color=kind.colour, label=kind.title)
        bottom = [below + size for below, size in zip(bottom, sizes, strict=True)]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(top=1.5 * max(bottom))
    _dress(axes, STACK)


def _draw_panel(axes: Any, panel: Panel, runs: list[Run]) -> None:
    for run in runs:
        if panel.faint:
            axes.plot(*run.points(panel.faint, panel.unit), color=run.colour, alpha=0.35, linewidth=run.width / 2)
        axes.plot(*run.points(panel.strong, panel.unit), color=run.colour, label=run.name, linewidth=run.width)
    axes.set_xlabel("optimizer step", fontsize=9)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    _dress(axes, panel.title)


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)
    axes.grid(color="#eaeef2")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)


def _draw_table(axes: Any, runs: list[Run]) -> None:
    axes.set_axis_off()
    head, rows = table_head(runs), table_rows(runs)
    table = axes.table(
        cellText=rows, colLabels=head, loc="upper left", cellLoc="right", colLoc="right", edges="horizontal"
    )
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    for (row, column), cell in table.get_celld().items():
        cell.set_edgecolor("#d0d7de")
        weight = "bold" if row == 0 else "normal"
        cell.set_text_props(ha="left" if column == 0 else "right", weight=weight)
