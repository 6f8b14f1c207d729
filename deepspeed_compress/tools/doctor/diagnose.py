"""All rules over a run: what was found, worst first, what was looked at, and what could not be."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config import find_problems
from deepspeed_compress.tools.doctor.case import NEEDS, Case
from deepspeed_compress.tools.doctor.finding import SEVERITIES, Finding, Rule, Severity
from deepspeed_compress.tools.doctor.patches import apply, difference
from deepspeed_compress.tools.doctor.rules import RULES

__all__ = ["Diagnosis", "Found", "diagnose", "patched"]


@dataclass(frozen=True)
class Found:
    """A finding of a rule. `patch`: a JSON merge patch of the run's configuration, None where no setting helps, the
    configuration is not known, or it would not be valid with the change (`obstacle` says why)."""

    rule: Rule
    finding: Finding
    patch: Mapping[str, Any] | None
    obstacle: str = ""

    @property
    def severity(self) -> Severity:
        return self.finding.severity or self.rule.severity


@dataclass(frozen=True)
class Diagnosis:
    """`unchecked`: rules that lack something, and what they lack."""

    case: Case
    found: tuple[Found, ...]
    checked: tuple[Rule, ...]
    unchecked: tuple[tuple[Rule, tuple[str, ...]], ...]


def diagnose(case: Case, rules: tuple[Rule, ...] = RULES) -> Diagnosis:
    """What holds the run of `case` back."""
    lacking = [(rule, tuple(need for need in rule.needs if case.lacks(need))) for rule in rules]
    checked = tuple(rule for rule, needs in lacking if not needs)
    found = [_with_patch(rule, finding, case.run.config) for rule in checked for finding in rule.find(case)]
    found.sort(key=lambda one: (SEVERITIES.index(one.severity), -one.finding.weight))
    unchecked = tuple((rule, tuple(map(_called, needs))) for rule, needs in lacking if needs)
    return Diagnosis(case, tuple(found), checked, unchecked)


def _called(need: str) -> str:
    return " or ".join(NEEDS[option][0] if option in NEEDS else option for option in need.split("|"))


def _with_patch(rule: Rule, finding: Finding, config: Mapping[str, Any] | None) -> Found:
    if finding.wanted is None or config is None:
        return Found(rule, finding, None)
    problems = find_problems(finding.wanted)
    if problems:
        return Found(rule, finding, None, str(problems[0]))
    return Found(rule, finding, difference(config, finding.wanted))


def patched(diagnosis: Diagnosis) -> tuple[dict[str, Any], tuple[Found, ...], tuple[Found, ...]]:
    """The configuration with the patches merged in, worst finding first; the findings whose patches are in it, and
    those left out: they change what a worse one has changed already, or would not be valid beside it."""
    config: dict[str, Any] = dict(diagnosis.case.run.config or {})
    taken: list[Found] = []
    left: list[Found] = []
    places: set[tuple[str, ...]] = set()
    for one in diagnosis.found:
        if one.patch is None:
            continue
        changed, result = set(_places(one.patch)), apply(config, one.patch)
        if _clash(changed, places) or find_problems(result):
            left.append(one)
            continue
        config, places = result, places | changed
        taken.append(one)
    return config, tuple(taken), tuple(left)


def _places(patch: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys that a patch sets. All of `gradients` is one: settings of two remedies would be of no one's making."""
    for key, value in patch.items():
        inside = isinstance(value, Mapping) and bool(value) and key != "gradients"
        yield from _places(value, (*path, key)) if inside else [(*path, key)]


def _clash(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> bool:
    return any(a[: len(b)] == b or b[: len(a)] == a for a in one for b in other)
