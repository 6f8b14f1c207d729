"""Figures of the exchanges between islands."""

import statistics
from typing import Any

from deepspeed_compress.tools.report.runs import Run

_EXCHANGE, _VOID = "islands_exchange", "islands_void"


def count(run: Run) -> float | None:
    """Return the number of exchanges, or None if there are none.

    Counts the events of elastic islands if there are any, otherwise the measured steps with an exchange.
    """
    return len(_events(run, _EXCHANGE)) or len(_sizes(run)) or None


def sent(run: Run) -> float | None:
    """Return the mean number of bytes that a rank sends in an exchange, or None if there are no exchanges."""
    sizes = _sizes(run)
    return statistics.fmean(sizes.values()) if sizes else None


def extra_milliseconds(run: Run) -> float | None:
    """Return how many milliseconds longer a step after an exchange takes, as a difference of medians."""
    after = _sizes(run).keys()
    with_exchange: list[float] = []
    without: list[float] = []
    for step, taken in run.column("step_ms").items():
        (with_exchange if step in after else without).append(taken)
    return statistics.median(with_exchange) - statistics.median(without) if with_exchange and without else None


def void(run: Run) -> float | None:
    """Return the number of exchanges that were discarded, or None for islands that do not record it."""
    return float(len(_events(run, _VOID))) if _events(run, _EXCHANGE) or _events(run, _VOID) else None


def waited_seconds(run: Run) -> float | None:
    """Return the seconds for which exchanges blocked training, or None for islands that do not record it."""
    evidences = [event.get("evidence") or {} for event in run.events if str(event["kind"]).startswith("islands_")]
    return sum(evidence.get("seconds") or 0.0 for evidence in evidences) if evidences else None


def _sizes(run: Run) -> dict[int, Any]:
    return {step: size for step, size in run.column("bytes_islands").items() if size}


def _events(run: Run, kind: str) -> list[Any]:
    return [event for event in run.events if event["kind"] == kind]
