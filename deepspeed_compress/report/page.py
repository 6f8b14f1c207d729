"""The page of a report: charts of plotly, a table, and what the runs were made with. It needs no other file."""

import html
import re
from collections.abc import Iterable
from typing import Any

from deepspeed_compress.report.runs import PANELS, STACK, Kind, Panel, Run, table_head, table_rows, traffic

__all__ = ["page"]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"


def page(runs: list[Run]) -> str:
    """The HTML of a report on `runs`."""
    title = " against ".join(html.escape(run.name) for run in reversed(runs))
    charts = [_chart(panel, runs, with_library=index == 0) for index, panel in enumerate(PANELS)]
    kinds = traffic(runs)
    if kinds:
        charts.append(_stack_chart(kinds, [run.name for run in runs]))
    return PAGE.format(
        title=title, font=FONT, table=_html_table(runs), charts="\n".join(charts), details=_details(runs)
    )


def _chart(panel: Panel, runs: list[Run], with_library: bool) -> str:
    import plotly.graph_objects as go

    figure = go.Figure()
    for run in runs:
        for key, opacity, width, legend in ((panel.faint, 0.35, 0.5, False), (panel.strong, 1.0, 1.0, True)):
            if key:
                steps, values = run.points(key, panel.unit)
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
        xaxis={"title": "optimizer step"}, yaxis={"rangemode": "tozero" if panel.from_zero else "normal"}
    )
    return _section(figure, panel.title, with_library)


def _stack_chart(kinds: list[tuple[Kind, list[float]]], names: list[str]) -> str:
    import plotly.graph_objects as go

    figure = go.Figure()
    for kind, sizes in kinds:
        figure.add_bar(x=names, y=sizes, name=kind.title, marker={"color": kind.colour}, width=0.5)
    figure.update_layout(barmode="stack", xaxis={"type": "category"})
    return _section(figure, STACK, with_library=False)


def _section(figure: Any, title: str, with_library: bool) -> str:
    figure.update_layout(
        template="plotly_white",
        height=320,
        margin={"l": 48, "r": 12, "t": 8, "b": 40},
        font={"family": FONT, "size": 12},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        hovermode="x unified",
    )
    drawn = figure.to_html(
        full_html=False, include_plotlyjs=with_library, config={"displayModeBar": False, "responsive": True}
    )
    return f"<section><h2>{html.escape(title)}</h2>{drawn}</section>"


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
