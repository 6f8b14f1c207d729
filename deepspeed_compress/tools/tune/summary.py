"""What a search has found: rows, one for each candidate, and their forms as JSON, as Markdown and on the terminal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from rich.markup import escape
from rich.table import Table

from deepspeed_compress.config import SECTION
from deepspeed_compress.tools.tune.halving import Result, Round, best, loss_gap, reasons
from deepspeed_compress.tools.tune.search import Outcome
from deepspeed_compress.tools.tune.space import BASELINE, Candidate, LeftOut

__all__ = ["HEAD", "Aim", "Row", "Summary", "as_json", "as_markdown", "as_table", "cells", "conclusion", "summarise"]


@dataclass(frozen=True)
class Aim:
    """What the search was for: the least `metric`, with a loss gap of at most `target`."""

    target: float
    metric: str


@dataclass(frozen=True)
class Row:
    """A candidate in the longest of its trials. `gap`, `time`: to the baseline of the same rung, nan where unknown.

    `remark`: why it went no further.
    """

    name: str
    settings: str
    rung: int
    steps: int
    result: Result
    gap: float
    speed: float
    fewer: float
    remark: str


@dataclass(frozen=True)
class Summary:
    """Rows in the order of their worth. `chosen`: the best candidate, the baseline when none is better."""

    aim: Aim
    rows: tuple[Row, ...]
    chosen: Candidate
    outcome: Outcome
    left_out: tuple[LeftOut, ...]

    @property
    def row(self) -> Row | None:
        """Of what was chosen; None when it was not measured."""
        return next((row for row in self.rows if row.name == self.chosen.name and row.result.finished), None)


def summarise(outcome: Outcome, candidates: Sequence[Candidate], left_out: Sequence[LeftOut], aim: Aim) -> Summary:
    """The rows of all candidates that were tried, and the choice."""
    known = {candidate.name: candidate for candidate in candidates}
    found = best(outcome.rounds, aim.target, aim.metric)
    chosen = known[found[1].name if found else BASELINE]
    rounds = {
        name: last for last in outcome.rounds for name, result in last.results.items() if result.status != "stopped"
    }
    if found:
        rounds[chosen.name] = found[0]
    rows = [_row(known[name], last, chosen.name, aim) for name, last in rounds.items()]
    rows.sort(key=lambda row: (row.name != chosen.name, row.name != BASELINE, -row.rung, row.result.step_ms))
    return Summary(aim, tuple(rows), chosen, outcome, tuple(left_out))


def _row(candidate: Candidate, last: Round, chosen: str, aim: Aim) -> Row:
    result, baseline = last.results[candidate.name], last.baseline
    gap = speed = fewer = math.nan
    if baseline is not None and result.finished:
        gap, speed = loss_gap(result, baseline), baseline.step_ms / result.step_ms
        fewer = baseline.bytes / result.bytes if result.bytes else math.inf
    remark = "" if baseline is None else reasons(last, aim.metric).get(candidate.name, "")
    remark = result.error or ("best" if candidate.name == chosen else remark)
    return Row(candidate.name, candidate.settings, last.rung.number, last.rung.steps, result, gap, speed, fewer, remark)


def conclusion(summary: Summary) -> list[str]:
    """Sentences for people: what to take, on what evidence, and what is missing."""
    row, aim = summary.row, summary.aim
    lines = [f"Ended early: {summary.outcome.stopped}."] if summary.outcome.stopped else []
    if row is None:
        return [*lines, "Nothing was measured."]
    if row.name == BASELINE:
        what = f"{BETTER[aim.metric]} than uncompressed training with a loss gap of at most {aim.target:.2%}"
        return [*lines, f"No candidate {what}: leave gradients uncompressed, or allow a larger gap."]
    figures = f"{row.speed:.2f} times as fast, {row.fewer:.1f} times fewer bytes, loss gap {row.gap:+.2%}"
    return [*lines, f"Best: {row.name} ({row.settings}): {figures}, in trials of {row.steps} steps."]


def as_json(summary: Summary) -> dict[str, Any]:
    """Everything, without what JSON cannot express: figures that are not finite are null."""
    outcome = summary.outcome
    return {
        "target_loss_gap": summary.aim.target,
        "metric": summary.aim.metric,
        "best": {"name": summary.chosen.name, SECTION: summary.chosen.section},
        "conclusion": conclusion(summary),
        "stopped": outcome.stopped or None,
        "rows": [_finite(asdict(row)) for row in summary.rows],
        "left_out": [asdict(left) for left in summary.left_out],
        "rungs": [
            {**asdict(one.rung), "trials": [_finite(asdict(result)) for result in one.results.values()]}
            for one in outcome.rounds
        ],
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


BETTER: Mapping[str, str] = MappingProxyType({"step_time": "is faster", "bytes": "sends less"})
HEAD = ("candidate", "settings", "steps", "step, ms", "faster", "MB a step", "fewer", "loss gap", "cosine", "")


def cells(row: Row) -> tuple[str, ...]:
    """The texts of a row, under `HEAD`."""
    result = row.result
    return (
        row.name,
        row.settings,
        str(row.steps),
        _shown(result.step_ms, "{:,.0f}" if result.step_ms >= 100 else "{:.1f}"),
        _shown(row.speed, "{:.2f} x"),
        _shown(result.bytes / 1e6, "{:,.3f}"),
        _shown(row.fewer, "{:.1f} x"),
        _shown(row.gap, "{:+.2%}"),
        _shown(math.nan if result.cosine is None else result.cosine, "{:.3f}"),
        row.remark,
    )


def _shown(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "-"


def as_table(summary: Summary) -> Table:
    """The rows, for a terminal."""
    table = Table(
        title=f"loss gap of at most {summary.aim.target:.2%}, least {summary.aim.metric}", title_justify="left"
    )
    for index, title in enumerate(HEAD):
        figure = 2 <= index < len(HEAD) - 1
        table.add_column(title, justify="right" if figure else "left", no_wrap=figure)
    for row in summary.rows:
        table.add_row(*map(escape, cells(row)), style="bold" if row.name == summary.chosen.name else None)
    return table


def as_markdown(summary: Summary, command: str) -> str:
    """The rows, the conclusion, and what was left out."""
    head = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in summary.rows]
    left = [f"- `{one.name}`: {one.reason}" for one in summary.left_out]
    parts = ["\n".join(conclusion(summary)), "\n".join([*head, *body]), f"```bash\n{command}\n```"]
    return "# Tuning\n\n" + "\n\n".join([*parts, *(["Left out:\n\n" + "\n".join(left)] if left else [])]) + "\n"
