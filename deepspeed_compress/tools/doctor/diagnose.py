"""Application of all rules to a run: the findings, the rules that were checked, and those that lack data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_compress.config.section import find_problems
from deepspeed_compress.diagnostics import SEVERITIES, Diagnostic
from deepspeed_compress.tools.doctor.case import NEEDS, Case
from deepspeed_compress.tools.doctor.patches import apply
from deepspeed_compress.tools.doctor.rule import DoctorRule
from deepspeed_compress.tools.doctor.rules import RULES


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
    obstacles: Mapping[str, str]
    """First problem of the patched configuration, by name of the rule, for patches that would make it invalid."""


def diagnose(case: Case, rules: tuple[DoctorRule, ...] = RULES) -> Diagnosis:
    """Check `rules` against the run of `case` and return the diagnosis."""
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
    """Return the first problem of the configuration after the patch, or an empty string if it is valid."""
    problems = () if one.patch is None else find_problems(apply(case.run.config, one.patch))
    return str(problems[0]) if problems else ""


def patched(diagnosis: Diagnosis) -> tuple[dict[str, Any], tuple[Diagnostic, ...], tuple[Diagnostic, ...]]:
    """Merge the patches of the findings into the configuration, most severe finding first.

    A patch is left out if it changes a setting that an earlier one has changed, or if the merged configuration would be
    invalid.

    Returns:
        The configuration, the findings whose patches it contains, and the findings whose patches were left out.
    """
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
    """Yield the paths of the keys that a patch sets.

    `gradients` counts as a single key, so that the settings of two remedies for it are never mixed.
    """
    for key, value in patch.items():
        inside = isinstance(value, Mapping) and bool(value) and key != "gradients"
        yield from _places(value, (*path, key)) if inside else [(*path, key)]


def _clash(one: set[tuple[str, ...]], other: set[tuple[str, ...]]) -> bool:
    return any(a[: len(b)] == b or b[: len(a)] == a for a in one for b in other)
