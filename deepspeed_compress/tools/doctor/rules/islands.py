"""Rules on islands: whether they move alike, exchange often enough, and take part in exchanges."""

import statistics
from collections.abc import Iterator
from typing import Any

from deepspeed_compress.diagnostics import Diagnostic, at_steps
from deepspeed_compress.tools.doctor.case import SAMPLES, Case
from deepspeed_compress.tools.doctor.patches import with_section
from deepspeed_compress.tools.doctor.rule import rule
from deepspeed_compress.tools.doctor.rules.learning import risen
from deepspeed_compress.tools.doctor.trends import count_exchanges, rise_at_exchanges

_MISSED = frozenset({"islands_left_out", "islands_renewed"})


@rule("warning", "whether islands move in similar directions", "islands")
def islands_drift_apart(case: Case) -> Iterator[Diagnostic]:
    """Report a low cosine between islands in the later half of the exchanges.

    At the start, all islands move in similar directions.
    """
    cosines = case.values("islands_cosine", case.run.steps)
    late = cosines[len(cosines) // 2 :]
    if len(cosines) < SAMPLES or statistics.median(late) >= case.limits.alike:
        return
    yield Diagnostic(
        at_steps(*case.span),
        f"Islands drift apart: the cosine between the movement of this island and those of the others is "
        f"{statistics.median(late):.2f}, so their mean keeps almost nothing of what each has learned",
        "Give all islands the same kind of data, shuffled together, and exchange more often.",
        patch=_more_often(case),
        evidence={"cosine with the others, later half": statistics.median(late), "exchanges": len(cosines)},
    )


@rule(None, "whether the loss rises at exchanges between islands", "islands", "losses")
def sync_every_too_long(case: Case) -> Iterator[Diagnostic]:
    """Report a loss that rises at exchanges: the mean of weights that have drifted too far is worse than each of them.

    An outer step beyond the mean has the same effect.
    """
    rise = rise_at_exchanges(case)
    if rise is None:
        return
    yield Diagnostic(
        at_steps(*case.span),
        f"The loss rises by {rise.mean:.3g} at exchanges between islands: they have drifted too far apart to average",
        "Exchange more often, or halve the learning rate: islands drift by about the product of the two. If outer has "
        "momentum or an lr above 1, and so steps beyond the mean, halve its lr first.",
        patch=_smaller_steps(case) or _more_often(case),
        evidence={
            "rise of the loss at an exchange": rise.mean,
            "loss before the exchange": rise.before,
            "exchanges": rise.exchanges,
        },
        severity="warning" if risen(case) is None else "error",
        weight=min(1.0, rise.mean / rise.before) if rise.before else 1.0,
    )


@rule("warning", "whether this island is late for exchanges", "events")
def late_island(case: Case) -> Iterator[Diagnostic]:
    late = [event for event in case.run.events or () if event["kind"] in _MISSED]
    taken = count_exchanges(case)
    if len(late) < case.limits.anomalies or len(late) < case.limits.late * (len(late) + taken):
        return
    yield Diagnostic(
        at_steps(late[0]["step"], late[-1]["step"]),
        f"This island is late: it missed {len(late)} exchanges and took part in {taken}",
        "Check its machines and its link. If it is only slower, wait longer for it (timeout above its longest step), "
        "exchange by time (sync_every), or make islands asynchronous.",
        patch=case.patch(with_section, {"islands": {"elastic": change}}) if (change := _longer_timeout(case)) else None,
        evidence={"exchanges missed": len(late), "exchanges with this island": taken},
    )


def _more_often(case: Case) -> dict[str, Any] | None:
    islands = case.run.section.islands if case.run.section is not None else None
    every = islands.sync_steps if islands is not None else None
    if islands is None or every is None or every // 2 <= islands.delay or every // 2 < islands.fragments:
        return None
    return case.patch(with_section, {"islands": {"sync_every": every // 2}})


def _smaller_steps(case: Case) -> dict[str, Any] | None:
    """Return a patch that halves the outer learning rate, if `outer` steps beyond the mean of the islands."""
    islands = case.run.section.islands if case.run.section is not None else None
    if islands is None or (islands.outer.optimizer == "average" and islands.outer.lr <= 1):
        return None
    return case.patch(with_section, {"islands": {"outer": {"lr": islands.outer.lr / 2}}})


def _longer_timeout(case: Case) -> dict[str, Any] | None:
    """Return twice the timeout of elastic islands, or None if the section has none or the result is not allowed."""
    islands = case.run.section.islands if case.run.section is not None else None
    if islands is None or islands.elastic is None:
        return None
    elastic = islands.elastic
    if elastic.parameter_server is not None:
        return {"parameter_server": {"max_staleness": 2 * elastic.parameter_server.max_staleness}}
    longer = 2 * elastic.timeout_seconds
    return {"timeout": f"{longer:g} s"} if longer <= elastic.give_up_seconds else None
