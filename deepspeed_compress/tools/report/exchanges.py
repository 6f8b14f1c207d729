"""Figures of the exchanges between islands."""

import statistics
from collections.abc import Mapping
from typing import Any

from deepspeed_compress.tools.report.runs import Run


def count(run: Run) -> float | None:
    """Return the number of measured steps that follow an exchange, or None if there are none.

    Their bytes tell. An event is only written if other islands took part than in the exchange before, or if it failed.
    """
    return len(_sizes(run)) or None


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
    return float(sum(event["kind"] == "islands_void" for event in run.events)) if _has_events(run) else None


def lost_seconds(run: Run) -> float | None:
    """Return the seconds that failed exchanges have taken, or None for islands that do not record it."""
    failed = [event for event in run.events if _is_of_islands(event) and event["kind"] != "islands_exchange"]
    return sum((event.get("evidence") or {}).get("seconds") or 0.0 for event in failed) if _has_events(run) else None


def _sizes(run: Run) -> dict[int, Any]:
    return {step: size for step, size in run.column("bytes_islands").items() if size}


def _has_events(run: Run) -> bool:
    return any(map(_is_of_islands, run.events))


def _is_of_islands(event: Mapping[str, Any]) -> bool:
    return str(event["kind"]).startswith("islands_")
