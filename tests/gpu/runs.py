"""Runs of ranks that trained, and how they are compared."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.gpu.ranks import Outcome

DIFFERENT = "losses or weights differ"
Run = Sequence[Mapping[str, Any]]
"""Results of a run, one per rank."""


def run_of(outcome: Outcome, stage: int, number: int) -> Run:
    """Return the results of the ranks that completed a run."""
    return [one for rank in outcome.results for one in rank if (one["stage"], one["run"]) == (stage, number)]


def problem_of(run: Run, ranks: int, trouble: str) -> str:
    """Return what is wrong with a run by itself, or ""."""
    if len(run) < ranks:
        return trouble or "no rank got there"
    if errors := [one["error"] for one in run if one["error"]]:
        return str(errors[0])
    if len({one["weights"] for one in run}) > 1:
        return "ranks have different weights"
    return "" if run[0]["losses"][-1] < run[0]["losses"][0] else f"the loss does not fall: {run[0]['losses']}"


def difference_of(first: Run, others: Sequence[Run], ranks: int, trouble: str) -> str:
    """Return what is wrong with `others`, each of which must equal `first` bit for bit, or ""."""
    if wrong := next(filter(None, (problem_of(run, ranks, trouble) for run in others)), ""):
        return wrong
    return DIFFERENT if any(bits_of(run) != bits_of(first) for run in others) else ""


def bits_of(run: Run) -> list[tuple[list[float], str]]:
    return [(one["losses"], one["weights"]) for one in run]


def problem_in_mirror(outcome: Outcome, stage: int, runs: int) -> str:
    """Return why results depend on when messages arrive, or "". The first two runs are undisturbed."""
    found = [run_of(outcome, stage, number) for number in range(runs)]
    if errors := [one["error"] for run in found for one in run if one["error"]]:
        return str(errors[0])
    if not all(found):
        return outcome.trouble or "it did not get there"
    first, again, *late = (bits_of(run) for run in found)
    if first != again:
        return "two undisturbed runs differ"
    return DIFFERENT if any(run != first for run in late) else ""
