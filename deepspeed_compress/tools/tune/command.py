"""The command `ds-compress tune`, and its result: a row for each candidate, as JSON and on the terminal."""

import argparse
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepspeed_compress.config import SECTION, parse_section, read_ds_config
from deepspeed_compress.config.numbers import change, finite, shown
from deepspeed_compress.config.problems import value_at
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.safe_files import write_json, write_text
from deepspeed_compress.tools.bench.hosts import signals_as_exceptions
from deepspeed_compress.tools.tables import new_console, new_table
from deepspeed_compress.tools.tune.search import Outcome, Round, best, loss_gap, make_rungs, reasons, search
from deepspeed_compress.tools.tune.space import BASELINE, Candidate, find_candidates, load_space
from deepspeed_compress.tools.tune.trials import EXPERIMENTS, Result, Trials, with_config

OPTIMAL = "ds_config_optimal.json"


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
    """Summary of a search for the smallest `metric` with a loss gap of at most `target`.

    `rows` are sorted by merit. `chosen` is the best candidate, or else the baseline.
    """

    target: float
    metric: str
    rows: tuple[Row, ...]
    chosen: Candidate
    outcome: Outcome
    left_out: Mapping[str, str]

    @property
    def row(self) -> Row | None:
        """Return the row of the chosen candidate, or None if it was not measured."""
        return next((row for row in self.rows if row.name == self.chosen.name and row.result.finished), None)


def summarise(
    outcome: Outcome, candidates: Sequence[Candidate], left_out: Mapping[str, str], target: float, metric: str
) -> Summary:
    """Return the summary: the rows of all candidates that were tried, and the choice."""
    known = {candidate.name: candidate for candidate in candidates}
    found = best(outcome.rounds, target, metric)
    chosen = known[found[1].name if found else BASELINE]
    rounds = {
        name: last for last in outcome.rounds for name, result in last.results.items() if result.status != "stopped"
    }
    if found:
        rounds[chosen.name] = found[0]
    rows = [_row(known[name], last, chosen.name, metric) for name, last in rounds.items()]
    rows.sort(key=lambda row: (row.name != chosen.name, row.name != BASELINE, -row.rung, row.result.step_ms))
    return Summary(target, metric, tuple(rows), chosen, outcome, left_out)


def _row(candidate: Candidate, last: Round, chosen: str, metric: str) -> Row:
    result, baseline = last.results[candidate.name], last.baseline
    gap = speed = fewer = math.nan
    if baseline is not None and result.finished:
        gap, speed = loss_gap(result, baseline), baseline.step_ms / result.step_ms
        fewer = baseline.bytes / result.bytes if result.bytes else math.inf
    remark = "" if baseline is None else reasons(last, metric).get(candidate.name, "")
    remark = result.error or ("best" if candidate.name == chosen else remark)
    return Row(candidate.name, candidate.settings, last.rung.number, last.rung.steps, result, gap, speed, fewer, remark)


def conclusion(summary: Summary) -> list[str]:
    """Return sentences that state the choice, the evidence for it, and what is missing."""
    row = summary.row
    lines = [f"Ended early: {summary.outcome.stopped}."] if summary.outcome.stopped else []
    if row is None:
        return [*lines, "Nothing was measured."]
    if not math.isfinite(row.result.loss):
        return [*lines, "The loss of uncompressed training is not finite, so nothing can be compared with it."]
    if row.name == BASELINE:
        what = f"{BETTER[summary.metric]} than uncompressed training with a loss gap of at most {summary.target:.2%}"
        return [*lines, f"No candidate {what}: leave gradients uncompressed, or allow a larger gap."]
    figures = f"{row.speed:.2f} times as fast, {row.fewer:.1f} times fewer bytes, loss gap {row.gap:+.2%}"
    return [*lines, f"Best: {row.name} ({row.settings}): {figures}, in trials of {row.steps} steps."]


def as_json(summary: Summary) -> dict[str, Any]:
    """Return the whole summary for JSON. Figures that are not finite become null."""
    outcome = summary.outcome
    return {
        "target_loss_gap": summary.target,
        "metric": summary.metric,
        "best": {"name": summary.chosen.name, SECTION: summary.chosen.section},
        "conclusion": conclusion(summary),
        "stopped": outcome.stopped or None,
        "rows": [finite(asdict(row)) for row in summary.rows],
        "left_out": [{"name": name, "reason": reason} for name, reason in summary.left_out.items()],
        "rungs": [
            {**asdict(one.rung), "trials": [finite(asdict(result)) for result in one.results.values()]}
            for one in outcome.rounds
        ],
    }


BETTER: Mapping[str, str] = {"step_time": "is faster", "bytes": "sends less"}
HEAD = ("candidate", "settings", "steps", "step, ms", "faster", "MB a step", "fewer", "loss gap", "")


def as_table(summary: Summary) -> Table:
    """Return the rows as a table for the terminal."""
    title = f"loss gap of at most {summary.target:.2%}, least {summary.metric}"
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
            escape(row.remark),
            style="bold" if row.name == summary.chosen.name else None,
        )
    return table


def run(options: argparse.Namespace) -> int:
    """Tune, and return the exit code: 0, or 1 if uncompressed training fails.

    Raises:
        ConfigError: The files or the command are wrong. Raised before any trial starts.
    """
    options.arguments = options.arguments[1:]  # drop the "--" of the command line
    console = new_console()
    ds_config = read_ds_config(options.config)
    if SECTION in ds_config:
        parse_section(ds_config)
    patches = None if options.space is None else load_space(options.space)
    candidates, left_out = find_candidates(ds_config, patches)
    _check(options, ds_config, candidates, left_out)
    (options.output / EXPERIMENTS).mkdir(parents=True, exist_ok=True)
    lines = [f"{len(candidates) - 1} candidates: {', '.join(candidate.name for candidate in candidates[1:])}"]
    _print(console, [*lines, *(f"left out: {name}: {reason}" for name, reason in left_out.items())])
    rungs = make_rungs(options.steps, options.rungs, options.target_loss_gap)
    end = time.monotonic() + (math.inf if options.time_budget is None else options.time_budget)
    trials = Trials(ds_config, options.config, options.launcher, options.arguments, options.output)
    # The running trial is in a session of its own, so it must be ended by this process.
    with signals_as_exceptions():
        left, say = lambda: end - time.monotonic(), lambda line: _print(console, [line])
        outcome = search(candidates, rungs, trials, options.metric, left, say)
    summary = summarise(outcome, candidates, left_out, options.target_loss_gap, options.metric)
    _write(summary, ds_config, options, console)
    return 0 if outcome.failure is None else 1


def _check(
    options: argparse.Namespace,
    ds_config: Mapping[str, Any],
    candidates: Sequence[Candidate],
    left_out: Mapping[str, str],
) -> None:
    """Check what would otherwise fail only after the first trial: the command, and that there is a candidate."""
    from deepspeed_compress.integrations.launch import launch_command

    if options.metric == "step_time" and value_at(ds_config, (SECTION, "communication", "max_rate")) is not None:
        problem = f"/{SECTION}/communication/max_rate: uncompressed trials have no such limit"
        raise ConfigError(f"{problem}; remove it and limit the link by tc, or set --metric bytes")
    if options.output.is_dir() and any(options.output.iterdir()) and not (options.output / EXPERIMENTS).is_dir():
        raise ConfigError(f"--output {options.output}: holds something else; choose a new directory")
    launch_command(options.launcher, with_config(options.arguments, options.config, options.config.resolve()))
    if len(candidates) == 1:
        reasons = "".join(f"\n  - {name}: {reason}" for name, reason in left_out.items())
        raise ConfigError(f"{options.config}: no candidate fits this file.{reasons}")


def _print(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _write(summary: Summary, ds_config: Mapping[str, Any], options: argparse.Namespace, console: Console) -> None:
    output: Path = options.output
    optimal = output / OPTIMAL
    arguments = with_config(options.arguments, options.config, optimal)
    launcher = [] if options.launcher == "deepspeed" else ["--launcher", options.launcher]
    command = shlex.join(["ds-compress", "run", *launcher, *arguments])
    write_json(output / "summary.json", as_json(summary))
    console.print(as_table(summary))
    lines = conclusion(summary)
    if summary.row is not None:
        write_json(optimal, {**ds_config, SECTION: summary.chosen.section}, private=True)
        write_text(output / "cmd_optimal.txt", command + "\n", private=True)
        lines += [f"{optimal}: your configuration with the best section. Train with it:", command]
    failure = summary.outcome.failure
    if failure is not None:
        lines += [f"  {line}" for line in failure.tail] + [f"uncompressed training failed: {failure.error}"]
    _print(console, lines)
