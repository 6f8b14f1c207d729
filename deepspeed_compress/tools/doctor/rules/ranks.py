"""Rules on ranks that are not equally fast."""

import statistics
from collections.abc import Iterator

from deepspeed_compress.diagnostics import Diagnostic, at_steps
from deepspeed_compress.tools.doctor.case import Case, Slowest
from deepspeed_compress.tools.doctor.rule import rule


@rule(
    name="straggler",
    severity="warning",
    summary="whether one rank keeps the others waiting",
    needs=("ranks",),
)
def straggler(case: Case) -> Iterator[Diagnostic]:
    slowest = case.slowest
    if slowest is None or not slowest.always or slowest.behind < case.limits.straggler:
        return
    figures = {
        "slowest rank": slowest.rank,
        "part of the steps in which it is": slowest.share,
        "busy, ms, median rank": statistics.median(line["busy_ms_median"] for line in slowest.lines),
        "busy, ms, slowest rank": statistics.median(line["busy_ms_max"] for line in slowest.lines),
    }
    yield Diagnostic(
        at_steps(*_span(slowest)),
        f"Rank {slowest.rank} is a straggler: it is {slowest.behind:.0%} of a step behind, and others wait",
        f"Look at what rank {slowest.rank} does besides (logging, loading data), at its input, which may be longer, "
        "and at its machine (clock, temperature, neighbours). No setting makes up for it.",
        evidence=figures,
        weight=min(1.0, slowest.behind),
    )


@rule(
    name="uneven-ranks",
    severity="info",
    summary="whether ranks are late by turns",
    needs=("ranks",),
)
def uneven_ranks(case: Case) -> Iterator[Diagnostic]:
    slowest = case.slowest
    if slowest is None or slowest.always or slowest.behind < case.limits.noise:
        return
    yield Diagnostic(
        at_steps(*_span(slowest)),
        f"Now one rank is late and now another, by {slowest.behind:.0%} of a step",
        "Give ranks cores and machines of their own, and batches of equal length.",
        evidence={"slowest rank, steps": {str(rank): count for rank, count in sorted(slowest.counts.items())}},
        weight=min(1.0, slowest.behind),
    )


def _span(slowest: Slowest) -> tuple[int, int]:
    return slowest.lines[0]["step"], slowest.lines[-1]["step"]
