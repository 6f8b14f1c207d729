"""All rules over a run: what was found, worst first, what was looked at, and what could not be."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_compress.config import find_problems
from deepspeed_compress.diagnostics import SEVERITIES, Diagnostic
from deepspeed_compress.tools.doctor.case import NEEDS, Case
from deepspeed_compress.tools.doctor.patches import apply
from deepspeed_compress.tools.doctor.rule import DoctorRule
from deepspeed_compress.tools.doctor.rules import RULES

__all__ = ["Diagnosis", "diagnose", "patched"]


@dataclass(frozen=True)
class Diagnosis:
    """What rules found in the run of `case`."""

    case: Case
    diagnostics: tuple[Diagnostic, ...]
    """Their patches are None where no setting helps, or the configuration is not known or would not be valid so."""
    checked: tuple[DoctorRule, ...]
    unchecked: tuple[tuple[DoctorRule, tuple[str, ...]], ...]
    """Rules that lack something, and what they lack."""
    obstacles: Mapping[str, str]
    """By name of a rule: why the configuration would not be valid with its patch."""


def diagnose(case: Case, rules: tuple[DoctorRule, ...] = RULES) -> Diagnosis:
    """What holds the run of `case` back."""
    lacking = [(rule, tuple(need for need in rule.needs if case.lacks(need))) for rule in rules]
    checked = tuple(rule for rule, needs in lacking if not needs)
    unchecked = tuple((rule, tuple(map(_described, needs))) for rule, needs in lacking if needs)
    found = [rule.attribute(one) for rule in checked for one in rule.check(case)]
    found.sort(key=lambda one: (SEVERITIES.index(one.severity), -one.weight))
    obstacles = {one.name: obstacle for one in found if (obstacle := _obstacle(case, one))}
    kept = (replace(one, patch=None) if one.name in obstacles else one for one in found)
    return Diagnosis(case, tuple(kept), checked, unchecked, obstacles)


def _described(need: str) -> str:
    return " or ".join(NEEDS[option][0] if option in NEEDS else option for option in need.split("|"))


def _obstacle(case: Case, one: Diagnostic) -> str:
    """The first thing wrong with the configuration after the patch; empty where it is valid."""
    problems = () if one.patch is None else find_problems(apply(case.run.config, one.patch))
    return str(problems[0]) if problems else ""


def patched(diagnosis: Diagnosis) -> tuple[dict[str, Any], tuple[Diagnostic, ...], tuple[Diagnostic, ...]]:
    """The configuration with the patches merged in, worst finding first; the findings whose patches are in it, and
    those left out: they change what a worse one has changed already, or would not be valid beside it."""
    config: dict[str, Any] = dict(diagnosis.case.run.config or {})
    taken: list[Diagnostic] = []
    left: list[Diagnostic] = []
    places: set[tuple[str, ...]] = set()
    for one in diagnosis.diagnostics:
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
