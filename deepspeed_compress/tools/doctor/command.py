"""Command `ds-compress doctor`: apply all rules to a run, and print the findings as text or JSON.

A diagnosis has the findings, the rules that were checked, and those that lack data.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from deepspeed_compress.choice_names import TIMES
from deepspeed_compress.config.loading import MASK
from deepspeed_compress.config.numbers import rounded
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.diagnostics import SEVERITIES, Diagnostic, Severity
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.doctor.case import NEEDS, Case, read_baseline, read_run
from deepspeed_compress.tools.doctor.patches import apply
from deepspeed_compress.tools.doctor.rule import DoctorRule
from deepspeed_compress.tools.doctor.rules import RULES
from deepspeed_compress.tools.outputs.machine import DOCTOR_KEYS, DOCTOR_SEVERITIES, objects, page, to_json
from deepspeed_compress.tools.outputs.report import plural, printable
from deepspeed_compress.tools.plan_job import read_setup


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
    found = [_with_prediction(case, _with_valid_patch(case, one)) for one in found]
    return Diagnosis(case, tuple(found), checked, unchecked)


def _described(need: str) -> str:
    return " or ".join(NEEDS[option][0] if option in NEEDS else option for option in need.split("|"))


def _with_valid_patch(case: Case, one: Diagnostic) -> Diagnostic:
    """Return the finding without its patch, and with the reason, if the patched configuration would be invalid."""
    problems = [] if one.patch is None else find_problems(apply(case.run.config, one.patch))
    if not problems:
        return one
    reason = f"There is no patch, because the patched configuration would be invalid: {problems[0]}"
    return replace(one, patch=None, remedy=f"{one.remedy} {reason}")


_PREDICTED = frozenset(
    {
        "communication-bound",
        "compression-does-not-pay",
        "frozen-weights-gathered",
        "no-ratio",
        "weights-uncompressed",
    }
)
"""Findings for which `plan cluster` predicts what each remedy gains."""


def _with_prediction(case: Case, one: Diagnostic) -> Diagnostic:
    """Return the finding with the command that predicts the gains of choices, if it takes the run's configuration."""
    file = case.run.config_file
    if one.name not in _PREDICTED or file is None:
        return one
    try:
        read_setup(file, 1)
    except ConfigError:
        return one
    command = shlex.join(["ds-compress", "plan", "cluster", "--model", "MODEL", "--config", str(file)])
    return replace(one, remedy=f"{one.remedy} On the cluster, `{command}` predicts how many {TIMES} each choice is.")


def patched(diagnosis: Diagnosis) -> tuple[dict[str, Any], tuple[Diagnostic, ...], tuple[Diagnostic, ...]]:
    """Merge the patches of the findings into the configuration, most severe finding first.

    A patch is left out if it would undo a change of an earlier one, or if the merged configuration would be invalid.

    Returns:
        The configuration, the findings whose patches it contains, and the findings whose patches were left out.
    """
    config: dict[str, Any] = dict(diagnosis.case.run.config or {})
    taken: list[Diagnostic] = []
    left: list[Diagnostic] = []
    for diagnostic in diagnosis.diagnostics:
        if diagnostic.patch is None:
            continue
        result = apply(config, diagnostic.patch)
        if find_problems(result) or any(apply(result, earlier.patch) != result for earlier in taken):
            left.append(diagnostic)
        else:
            config = result
            taken.append(diagnostic)
    return config, tuple(taken), tuple(left)


_COLOURS: Mapping[Severity, str] = {"error": "bold red", "warning": "yellow", "info": "cyan"}
HEALTHY, FOUND = 0, 1


def run(options: argparse.Namespace) -> int:
    """Diagnose a run and return the exit code: 0 if it is healthy, 1 with findings."""
    if options.apply is not None and options.apply.exists():
        raise ConfigError(f"--apply {options.apply}: exists already; write the name of a new file")
    baseline = read_baseline(options.baseline) if options.baseline is not None else None
    diagnosis = diagnose(Case(read_run(options.run_dir, options.config), baseline))
    if options.json:
        print(as_json(diagnosis), end="")
    else:
        print_text(diagnosis)
    if options.apply is not None:
        _apply(diagnosis, options.apply)
    return FOUND if diagnosis.diagnostics else HEALTHY


def _apply(diagnosis: Diagnosis, file: Path) -> None:
    """Write the patched configuration to `file` and report on stderr which findings it covers."""
    if diagnosis.diagnostics and diagnosis.case.run.config is None:
        raise ConfigError(f"--apply {file}: the run has no ds_config.json to change; pass it with --config FILE")
    config, taken, left = patched(diagnosis)
    if not taken:
        print(f"{file}: not written, because no setting remedies these findings", file=sys.stderr)
        return
    with file.open("x", encoding="utf-8") as stream:
        stream.write(json.dumps(config, indent=2) + "\n")
    print(f"{file}: written with changes for {_names(taken)}", file=sys.stderr)
    if MASK in json.dumps(config):
        print(f'{file}: replace "{MASK}" by your secrets, or pass the file that has them as --config', file=sys.stderr)
    if left:
        print(f"left out, because they change the same settings: {_names(left)}", file=sys.stderr)


def _names(found: tuple[Diagnostic, ...]) -> str:
    return ", ".join(one.name for one in found)


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
    steps, times = case.run.steps, case.times
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
