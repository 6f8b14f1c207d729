"""Result of a search: a row for each candidate, as JSON and on the terminal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from deepspeed_compress.config import SECTION
from deepspeed_compress.config.numbers import change, finite, shown
from deepspeed_compress.tools.tables import new_table
from deepspeed_compress.tools.tune.halving import Result, Round, best, loss_gap, reasons
from deepspeed_compress.tools.tune.search import Outcome
from deepspeed_compress.tools.tune.space import BASELINE, Candidate, Excluded


@dataclass(frozen=True)
class Objective:
    """Objective of the search: the smallest `metric` with a loss gap of at most `target`."""

    target: float
    metric: str


@dataclass(frozen=True)
class Row:
    """Row of the table: a candidate in its longest trial.

    Attributes:
        name: Name of the candidate.
        settings: Short text of its settings.
        rung: Number of the rung.
        steps: Optimizer steps of the trial.
        result: Result of the trial.
        gap: Loss gap to the baseline of the same rung, or NaN if unknown.
        speed: Step time of the baseline divided by the candidate's, or NaN if unknown.
        fewer: Bytes of the baseline divided by the candidate's, or NaN if unknown.
        remark: Reason why the candidate was not promoted.
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
    """Summary of a search. `rows` are sorted by merit. `chosen` is the best candidate, or else the baseline."""

    objective: Objective
    rows: tuple[Row, ...]
    chosen: Candidate
    outcome: Outcome
    left_out: tuple[Excluded, ...]

    @property
    def row(self) -> Row | None:
        """Return the row of the chosen candidate, or None if it was not measured."""
        return next((row for row in self.rows if row.name == self.chosen.name and row.result.finished), None)


def summarise(
    outcome: Outcome, candidates: Sequence[Candidate], left_out: Sequence[Excluded], objective: Objective
) -> Summary:
    """Return the summary: the rows of all candidates that were tried, and the choice."""
    known = {candidate.name: candidate for candidate in candidates}
    found = best(outcome.rounds, objective.target, objective.metric)
    chosen = known[found[1].name if found else BASELINE]
    rounds = {
        name: last for last in outcome.rounds for name, result in last.results.items() if result.status != "stopped"
    }
    if found:
        rounds[chosen.name] = found[0]
    rows = [_row(known[name], last, chosen.name, objective) for name, last in rounds.items()]
    rows.sort(key=lambda row: (row.name != chosen.name, row.name != BASELINE, -row.rung, row.result.step_ms))
    return Summary(objective, tuple(rows), chosen, outcome, tuple(left_out))


def _row(candidate: Candidate, last: Round, chosen: str, objective: Objective) -> Row:
    result, baseline = last.results[candidate.name], last.baseline
    gap = speed = fewer = math.nan
    if baseline is not None and result.finished:
        gap, speed = loss_gap(result, baseline), baseline.step_ms / result.step_ms
        fewer = baseline.bytes / result.bytes if result.bytes else math.inf
    remark = "" if baseline is None else reasons(last, objective.metric).get(candidate.name, "")
    remark = result.error or ("best" if candidate.name == chosen else remark)
    return Row(candidate.name, candidate.settings, last.rung.number, last.rung.steps, result, gap, speed, fewer, remark)


def conclusion(summary: Summary) -> list[str]:
    """Return sentences that state the choice, the evidence for it, and what is missing."""
    row, objective = summary.row, summary.objective
    lines = [f"Ended early: {summary.outcome.stopped}."] if summary.outcome.stopped else []
    if row is None:
        return [*lines, "Nothing was measured."]
    if not math.isfinite(row.result.loss):
        return [*lines, "The loss of uncompressed training is not finite, so nothing can be compared with it."]
    if row.name == BASELINE:
        what = (
            f"{BETTER[objective.metric]} than uncompressed training with a loss gap of at most {objective.target:.2%}"
        )
        return [*lines, f"No candidate {what}: leave gradients uncompressed, or allow a larger gap."]
    figures = f"{row.speed:.2f} times as fast, {row.fewer:.1f} times fewer bytes, loss gap {row.gap:+.2%}"
    return [*lines, f"Best: {row.name} ({row.settings}): {figures}, in trials of {row.steps} steps."]


def as_json(summary: Summary) -> dict[str, Any]:
    """Return the whole summary for JSON. Figures that are not finite become null."""
    outcome = summary.outcome
    return {
        "target_loss_gap": summary.objective.target,
        "metric": summary.objective.metric,
        "best": {"name": summary.chosen.name, SECTION: summary.chosen.section},
        "conclusion": conclusion(summary),
        "stopped": outcome.stopped or None,
        "rows": [finite(asdict(row)) for row in summary.rows],
        "left_out": [asdict(left) for left in summary.left_out],
        "rungs": [
            {**asdict(one.rung), "trials": [finite(asdict(result)) for result in one.results.values()]}
            for one in outcome.rounds
        ],
    }


BETTER: Mapping[str, str] = {"step_time": "is faster", "bytes": "sends less"}
HEAD = ("candidate", "settings", "steps", "step, ms", "faster", "MB a step", "fewer", "loss gap", "cosine", "")


def as_table(summary: Summary) -> Table:
    """Return the rows as a table for the terminal."""
    title = f"loss gap of at most {summary.objective.target:.2%}, least {summary.objective.metric}"
    table = new_table(title, HEAD, ("candidate", "settings", ""))
    for row in summary.rows:
        result = row.result
        table.add_row(
            row.name,
            escape(row.settings),
            str(row.steps),
            shown(result.step_ms, ",.0f" if result.step_ms >= 100 else ".1f"),
            shown(row.speed, ".2f", suffix=" x"),
            shown(result.bytes, ",.3f", 1e-6),
            shown(row.fewer, ".1f", suffix=" x"),
            change(row.gap),
            shown(result.cosine, ".3f"),
            escape(row.remark),
            style="bold" if row.name == summary.chosen.name else None,
        )
    return table
