"""HTML page of a report: figures, charts, settings, events and configuration of each run. It needs no other file."""

import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from deepspeed_compress.config import masked
from deepspeed_compress.tools.report.drawing import legend, svg_chart
from deepspeed_compress.tools.report.figures import table_head, table_rows, tiles
from deepspeed_compress.tools.report.panels import Bars, bars, charts, missing
from deepspeed_compress.tools.report.runs import Run
from deepspeed_compress.tools.report.timeline import (
    EVENT_HEAD,
    SHOWN,
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
        _section("In a step", "charts bars", [_bars(one) for one in bars(found)]),
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
    rows = "".join(
        f'<div class="bar"><span title="{_escape(name)}">{_escape(name)}</span><div class="parts">'
        + "".join(
            _part(values[index] / (max(totals) or 1.0), colour, f"{title}: {values[index]:,.4g} {shown.unit}")
            for title, colour, values in shown.parts
        )
        + f"</div><span>{totals[index]:,.4g} {shown.unit}</span></div>"
        for index, name in enumerate(shown.runs)
    )
    swatches = _legend((title, colour) for title, colour, _ in shown.parts)
    return f"<figure><figcaption><h3>{_escape(shown.title)}</h3>{swatches}</figcaption><div>{rows}</div></figure>"


def _part(share: float, colour: str, title: str) -> str:
    return f'<i style="--colour:var(--{colour});flex:0 0 {100 * share:.3f}%" title="{_escape(title)}"></i>'


def _legend(entries: Iterable[tuple[str, str]]) -> str:
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
    pieces = "".join(
        _part((end - begin) / last, colours[interval.setting], f"{interval.setting}: steps {begin} to {end - 1}")
        for interval, begin, end in zip(timeline.intervals, begins, ends, strict=True)
    )
    swatches = _legend(
        (f"{setting}: {steps}", colours[setting]) for setting, steps in steps_by_setting(timeline).items()
    )
    name = _escape(timeline.run)
    return (
        f'<div class="bar"><span title="{name}">{name}</span><div class="parts strip">{pieces}</div>'
        f"<span>{last:,} steps</span></div>{swatches}"
    )


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
    """Yield the configuration of a run and the sample that its model wrote, as HTML."""
    summary, name = run.files.summary or {}, _escape(run.name)
    if summary:
        config, model, seed = (summary.get(key) for key in ("config", "model", "seed"))
        yield f"<p>{name}: {_escape(f'{config}, {model}, seed {seed}')}</p>"
    if run.files.ds_config:
        text = _escape(json.dumps(masked(run.files.ds_config), indent=2))
        yield f"<details><summary>{name}: configuration</summary><pre>{text}</pre></details>"
    if summary.get("sample"):
        sample = _escape(re.sub(r"\n{3,}", "\n\n", summary["sample"]))
        yield f"<details open><summary>{name}: a sample of what the model writes</summary><pre>{sample}</pre></details>"
