"""A run as a page and a picture, alone or next to a baseline.

``python -m deepspeed_compress.report RUN [--baseline RUN] [--output DIR]`` writes report.html, which needs no
other file and no network, and report.png, and prints the table of figures.
"""

import argparse
import html
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import CompressError, DataError
from deepspeed_compress.train.records import COMPRESSION, METRICS, read_lines, read_summary

ACCENT, GREY = "#1f6feb", "#afb8c1"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


@dataclass(frozen=True)
class Run:
    """What a run left behind, and how its line is drawn; a wide baseline shows below the run."""

    name: str
    colour: str
    width: float
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]
    compression: list[dict[str, Any]]

    def points(self, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of `key`, from whichever file has it."""
        lines = [line for line in self.metrics + self.compression if line.get(key) is not None]
        return [line["step"] for line in lines], [line[key] for line in lines]


@dataclass(frozen=True)
class Panel:
    """One chart: `faint` and `strong` are keys in the run's files, their values are divided by `unit`."""

    title: str
    faint: str | None
    strong: str
    unit: float = 1.0
    from_zero: bool = True


PANELS = (
    Panel("Loss: held-out, and training (faint)", "train_loss", "eval_loss", from_zero=False),
    Panel("Gradients sent per rank and step, MB", None, "bytes_sent", unit=1e6),
    Panel("Step time, s", None, "step_time_s"),
)


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.3f} MB"


ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("held-out loss", "eval_loss", "{:.4f}".format),
    ("median step time", "median_step_s", "{:.3f} s".format),
    ("tokens per second", "tokens_per_s", "{:,.0f}".format),
    ("gradients sent per rank and step", "bytes_sent_per_step", _megabytes),
    ("compression ratio", "compression_ratio", "{:.2f}".format),
    ("optimizer steps", "steps", "{:,}".format),
    ("parameters", "parameters", "{:,}".format),
    ("processes", "world_size", str),
)
COMPARED = frozenset({"eval_loss", "median_step_s", "tokens_per_s", "bytes_sent_per_step"})


def write_report(run_dir: Path, baseline: Path | None, output: Path) -> tuple[Path, Path]:
    """Write report.html and report.png into the directory `output`; return their paths.

    Raises DataError when a run has no summary.json, or the plotting packages are missing.
    """
    runs = load_runs(run_dir, baseline)
    try:
        import matplotlib.figure  # noqa: F401
        import plotly.graph_objects  # noqa: F401
    except ImportError as error:
        raise DataError(f"a report needs {error.name}; write: pip install 'deepspeed-compress[plot]'") from None
    output.mkdir(parents=True, exist_ok=True)
    page, picture = output / "report.html", output / "report.png"
    page.write_text(_page(runs), encoding="utf-8")
    _draw(runs, picture)
    return page, picture


def load_runs(run_dir: Path, baseline: Path | None) -> list[Run]:
    """The baseline, if any, then the run. Raises DataError when one is not finished."""
    if baseline is None:
        return [_load(run_dir, run_dir.resolve().name, ACCENT, 1.8)]
    former, name = _distinct_names(baseline.resolve(), run_dir.resolve())
    return [_load(baseline, former, GREY, 3.4), _load(run_dir, name, ACCENT, 1.8)]


def _distinct_names(first: Path, second: Path) -> tuple[str, str]:
    """The last parts of two paths, as many as tell them apart: none/seed0 and int4/seed0."""
    for count in range(1, min(len(first.parts), len(second.parts))):
        names = "/".join(first.parts[-count:]), "/".join(second.parts[-count:])
        if names[0] != names[1]:
            return names
    return str(first), str(second)


def table_rows(runs: list[Run]) -> list[list[str]]:
    """Rows of text: name, one figure a run, and with a baseline the change from it."""
    present = [row for row in ROWS if any(run.summary.get(row[1]) is not None for run in runs)]
    return [_row(runs, *row) for row in present]


def table_head(runs: list[Run]) -> list[str]:
    """Column titles of `table_rows`."""
    return ["", *[run.name for run in runs], *(["change"] if len(runs) > 1 else [])]


def print_table(runs: list[Run]) -> None:
    """The table of figures, on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="final figures", title_justify="left")
    for index, title in enumerate(table_head(runs)):
        table.add_column(title, justify="right" if index else "left")
    for row in table_rows(runs):
        table.add_row(*row)
    Console().print(table)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 when a run cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed_compress.report", description=__doc__)
    parser.add_argument("run", type=Path, help="output directory of a run")
    parser.add_argument("--baseline", type=Path, help="output directory of the run to compare with")
    parser.add_argument("--output", type=Path, help="where the report goes (default: the run's directory)")
    options = parser.parse_args(argv)
    try:
        page, picture = write_report(options.run, options.baseline, options.output or options.run)
        print_table(load_runs(options.run, options.baseline))
    except CompressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report: {page}\npicture: {picture}")
    return 0


def _load(directory: Path, name: str, colour: str, width: float) -> Run:
    summary = read_summary(directory)
    # The summary says where compression.jsonl is, should the configuration have put it elsewhere.
    monitor = Path(summary.get("monitor_path") or directory)
    lines = read_lines(monitor / COMPRESSION)
    metrics = read_lines(directory / METRICS)
    return Run(name, colour, width, summary, metrics, lines)


def _row(runs: list[Run], title: str, key: str, form: Callable[[Any], str]) -> list[str]:
    values = [run.summary.get(key) for run in runs]
    cells = ["-" if value is None else form(value) for value in values]
    change = [_change(values, key)] if len(runs) > 1 else []
    return [title, *cells, *change]


def _change(values: list[Any], key: str) -> str:
    if key not in COMPARED or None in values or not values[0]:
        return ""
    return f"{values[1] / values[0] - 1:+.2%}"


def _draw(runs: list[Run], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.6), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(2, len(PANELS), height_ratios=(3.2, 2.0))
    for column, panel in enumerate(PANELS):
        _draw_panel(figure.add_subplot(grid[0, column]), panel, runs)
    _draw_table(figure.add_subplot(grid[1, :]), runs)
    figure.savefig(file, dpi=120)


def _draw_panel(axes: Any, panel: Panel, runs: list[Run]) -> None:
    for run in runs:
        if panel.faint:
            axes.plot(*_scaled(run, panel.faint, panel.unit), color=run.colour, alpha=0.35, linewidth=run.width / 2)
        axes.plot(*_scaled(run, panel.strong, panel.unit), color=run.colour, label=run.name, linewidth=run.width)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel("optimizer step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="#eaeef2")
    axes.spines[["top", "right"]].set_visible(False)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
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


def _page(runs: list[Run]) -> str:
    title = " against ".join(html.escape(run.name) for run in reversed(runs))
    charts = [_chart(panel, runs, with_library=index == 0) for index, panel in enumerate(PANELS)]
    return PAGE.format(
        title=title, font=FONT, table=_html_table(runs), charts="\n".join(charts), details=_details(runs)
    )


def _chart(panel: Panel, runs: list[Run], with_library: bool) -> str:
    import plotly.graph_objects as go

    figure = go.Figure()
    for run in runs:
        for key, opacity, width, legend in ((panel.faint, 0.35, 0.5, False), (panel.strong, 1.0, 1.0, True)):
            if key:
                steps, values = _scaled(run, key, panel.unit)
                line = {"color": run.colour, "width": run.width * width}
                figure.add_scatter(
                    x=steps,
                    y=values,
                    name=run.name,
                    mode="lines",
                    line=line,
                    opacity=opacity,
                    showlegend=legend,
                )
    figure.update_layout(
        template="plotly_white",
        height=320,
        margin={"l": 48, "r": 12, "t": 8, "b": 40},
        font={"family": FONT, "size": 12},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        xaxis={"title": "optimizer step"},
        yaxis={"rangemode": "tozero" if panel.from_zero else "normal"},
        hovermode="x unified",
    )
    drawn = figure.to_html(
        full_html=False, include_plotlyjs=with_library, config={"displayModeBar": False, "responsive": True}
    )
    return f"<section><h2>{html.escape(panel.title)}</h2>{drawn}</section>"


def _scaled(run: Run, key: str, unit: float) -> tuple[list[float], list[float]]:
    steps, values = run.points(key)
    return steps, [value / unit for value in values]


def _html_table(runs: list[Run]) -> str:
    head, body = _cells(table_head(runs), "th"), _body(table_rows(runs))
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _body(rows: Iterable[list[str]]) -> str:
    return "".join(_cells(row, "td") for row in rows)


def _cells(cells: list[str], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _details(runs: list[Run]) -> str:
    """What each run was made with, and what it wrote."""
    parts = []
    for run in runs:
        config, model, seed = (run.summary.get(key) for key in ("config", "model", "seed"))
        made = f"{run.name}: {config}, {model}, seed {seed}"
        sample = html.escape(re.sub(r"\n{3,}", "\n\n", run.summary.get("sample") or ""))
        parts.append(f"<p>{html.escape(made)}</p>" + (f"<pre>{sample}</pre>" if sample else ""))
    return "".join(parts)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
body {{ margin: 0 auto; padding: 1.2rem; max-width: 72rem; }}
body {{ font-family: {font}; color: #1f2328; line-height: 1.45; }}
h1 {{ font-size: 1.35rem; font-weight: 600; }}
h2 {{ font-size: 1rem; font-weight: 600; margin: 0 0 .3rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }}
th, td {{ padding: .35rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #d8dee4; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; white-space: normal; }}
@media (max-width: 30rem) {{ th, td {{ padding: .35rem .3rem; font-size: .8rem; }} }}
.charts {{ display: grid; gap: 1.6rem; margin: 1.8rem 0; }}
.charts {{ grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }}
section {{ min-width: 0; }}
pre {{ white-space: pre-wrap; background: #f6f8fa; padding: .8rem; border-radius: 6px; font-size: .85rem; }}
</style></head><body>
<h1>{title}</h1>
<div class="wide">{table}</div>
<div class="charts">{charts}</div>
<h2>Made with, and a sample of what the model writes</h2>
{details}
</body></html>
"""

if __name__ == "__main__":
    sys.exit(main())
