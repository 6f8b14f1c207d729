"""Rules on ranks that are not equally fast."""

import statistics
from collections.abc import Iterator

from deepspeed_compress.diagnostics import Diagnostic, at_steps
from deepspeed_compress.tools.doctor.case import Case, Slowest
from deepspeed_compress.tools.doctor.rule import rule


@rule("warning", "whether one rank keeps the others waiting", "ranks")
def straggler(case: Case) -> Iterator[Diagnostic]:
    slowest = case.slowest
    if slowest is None or not slowest.always or slowest.behind < case.limits.straggler:
        return
    figures = {
        "slowest rank": slowest.rank,
        "part of the steps in which it is the slowest": slowest.share,
        "busy, ms, median rank": statistics.median(line["busy_ms_median"] for line in slowest.lines),
        "busy, ms, slowest rank": statistics.median(line["busy_ms_max"] for line in slowest.lines),
    }
    yield Diagnostic(
        at_steps(*_span(slowest)),
        f"Rank {slowest.rank} is a straggler: it is {slowest.behind:.0%} of a step behind, and the others wait for it",
        f"Check what else rank {slowest.rank} does (logging, loading data), whether its input is longer, and its "
        "machine (clock, temperature, other jobs). No setting helps.",
        evidence=figures,
        weight=min(1.0, slowest.behind),
    )


@rule("info", "whether different ranks are late in different steps", "ranks")
def uneven_ranks(case: Case) -> Iterator[Diagnostic]:
    slowest = case.slowest
    if slowest is None or slowest.always or slowest.behind < case.limits.noise:
        return
    yield Diagnostic(
        at_steps(*_span(slowest)),
        f"Different ranks are late in different steps, by {slowest.behind:.0%} of a step",
        "Give each rank its own cores, and batches of equal length.",
        evidence={"slowest rank, steps": {str(rank): count for rank, count in sorted(slowest.counts.items())}},
        weight=min(1.0, slowest.behind),
    )


def _span(slowest: Slowest) -> tuple[int, int]:
    return slowest.lines[0]["step"], slowest.lines[-1]["step"]
