"""Command `ds-compress doctor`: apply all rules to a run, and print the findings as text or JSON.

A diagnosis has the findings, the rules that were checked, and those that lack data.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from deepspeed_compress.config.numbers import rounded
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.diagnostics import SEVERITIES, Diagnostic, Severity
from deepspeed_compress.tools.doctor.case import NEEDS, Case, read_baseline, read_run
from deepspeed_compress.tools.doctor.patches import apply
from deepspeed_compress.tools.doctor.rule import DoctorRule
from deepspeed_compress.tools.doctor.rules import RULES
from deepspeed_compress.tools.outputs.machine import DOCTOR_KEYS, DOCTOR_SEVERITIES, objects, page, to_json
from deepspeed_compress.tools.outputs.report import plural, printable


@dataclass(frozen=True)
class Diagnosis:
    """Result of checking all rules against the run of `case`."""

    case: Case
    diagnostics: tuple[Diagnostic, ...]
    """Findings, most severe first.

    A patch is None if no setting helps, if the configuration is unknown, or if the patched configuration would be
    invalid.
    """
    checked: tuple[DoctorRule, ...]
    unchecked: tuple[tuple[DoctorRule, tuple[str, ...]], ...]
    """Rules that could not be checked, each with a description of the data it lacks."""


def diagnose(case: Case, rules: tuple[DoctorRule, ...] = RULES) -> Diagnosis:
    """Check `rules` against the run of `case` and return the diagnosis."""
    lacking = [(rule, tuple(need for need in rule.needs if case.lacks(need))) for rule in rules]
    checked = tuple(rule for rule, needs in lacking if not needs)
    unchecked = tuple((rule, tuple(map(_described, needs))) for rule, needs in lacking if needs)
    found = [rule.attribute(one) for rule in checked for one in rule.check(case)]
    found.sort(key=lambda one: (SEVERITIES.index(one.severity), -one.weight))
    return Diagnosis(case, tuple(_with_valid_patch(case, one) for one in found), checked, unchecked)


def _described(need: str) -> str:
    return " or ".join(NEEDS[option][0] if option in NEEDS else option for option in need.split("|"))


def _with_valid_patch(case: Case, one: Diagnostic) -> Diagnostic:
    """Return the finding without its patch, and with the reason, if the patched configuration would be invalid."""
    problems = [] if one.patch is None else find_problems(apply(case.run.config, one.patch))
    if not problems:
        return one
    reason = f"There is no patch, because the patched configuration would be invalid: {problems[0]}"
    return replace(one, patch=None, remedy=f"{one.remedy} {reason}")


_COLOURS: Mapping[Severity, str] = {"error": "bold red", "warning": "yellow", "info": "cyan"}
HEALTHY, FOUND = 0, 1


def run(options: argparse.Namespace) -> int:
    """Diagnose a run and return the exit code: 0 if it is healthy, 1 with findings."""
    baseline = read_baseline(options.baseline) if options.baseline is not None else None
    diagnosis = diagnose(Case(read_run(options.run_dir, options.config), baseline))
    if options.json:
        print(as_json(diagnosis), end="")
    else:
        print_text(diagnosis)
    return FOUND if diagnosis.diagnostics else HEALTHY


def as_json(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as a JSON object. Its keys are described in docs/doctor.md."""
    case = diagnosis.case
    return to_json(
        {
            "run": str(case.run.directory),
            "baseline": None if case.baseline is None else str(case.baseline.directory),
            "findings": objects(diagnosis.diagnostics, DOCTOR_KEYS),
            "checked": [rule.name for rule in diagnosis.checked],
            "not_checked": {rule.name: list(needs) for rule, needs in diagnosis.unchecked},
        }
    )


def print_text(diagnosis: Diagnosis) -> None:
    """Print the findings with their remedies, then the checks without findings and those that lacked data."""
    console = Console(soft_wrap=False)
    console.print(escape(printable(_head(diagnosis.case))), highlight=False)
    for number, one in enumerate(diagnosis.diagnostics, start=1):
        _print_finding(console, number, one)
    console.print()
    if not diagnosis.diagnostics:
        console.print("[green]No problems found.[/green]")
    named = {diagnostic.name for diagnostic in diagnosis.diagnostics}
    _print_list(console, "Checked, without a finding:", [r.summary for r in diagnosis.checked if r.name not in named])
    few = f"fewer than {diagnosis.case.limits.lines} measured steps"
    lines = [f"{rule.summary} (needs {', '.join(needs)})" for rule, needs in diagnosis.unchecked]
    _print_list(console, f"Not checked, because data is missing or there are {few}:", lines)


def _head(case: Case) -> str:
    steps, times = case.run.steps, case.known_times
    shown = steps[-1].get("settings") or steps[-1].get("method") or "unknown settings"
    count = plural(len(steps), "measured step")
    head = f"{case.run.directory}: {count}, the last one {steps[-1]['step']:,}, with {shown}."
    if times is None:
        return head
    parts = f"{times.step:.4g} ms: encoding and decoding {times.cost:.3g}, waiting for messages {times.wait:.3g}"
    return f"{head} A compressed step takes {parts}."


def _print_finding(console: Console, number: int, one: Diagnostic) -> None:
    colour, severity = _COLOURS[one.severity], DOCTOR_SEVERITIES[one.severity]
    console.print(f"\n[{colour}]{number}. {one.name}[/{colour}] ({severity})", highlight=False)
    first, last = one.place.steps or (0, 0)
    body = [f"{one.message}.", *_evidence(one.evidence), f"steps {first:,} to {last:,}", f"Remedy: {one.remedy}"]
    body = [printable(line) for line in body]
    if one.patch is not None:
        body += ["Merge into ds_config.json:", json.dumps(one.patch, indent=2)]
    for line in [*body, f"More: {page(one)}"]:
        console.print(Padding(escape(line), (0, 0, 0, 3)), highlight=False)


def _evidence(evidence: Mapping[str, Any]) -> Iterator[str]:
    for name, value in evidence.items():
        if isinstance(value, list):
            yield f"- {name}:"
            yield from (f"    {_shown(item)}" for item in value)
        else:
            yield f"- {name}: {_shown(value)}"


def _shown(value: Any) -> str:
    return rounded(value) if isinstance(value, int | float) else str(value)


def _print_list(console: Console, title: str, lines: list[str]) -> None:
    if lines:
        console.print(title, highlight=False)
        for line in lines:
            console.print(Padding(escape(f"- {line}"), (0, 0, 0, 3)), highlight=False)
