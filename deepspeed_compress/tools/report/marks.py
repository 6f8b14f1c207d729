"""Events of a run: how they are marked in a chart, and their table."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from deepspeed_compress.tools.report.reading import Run

__all__ = ["SYMBOLS", "Mark", "Symbol", "event_head", "event_rows", "marks"]

SHOWN = 300
"""Rows of the table of events: the last ones."""


@dataclass(frozen=True)
class Symbol:
    """`outline`: of a symbol around (0, 0), as an SVG path; `marker`: the same in matplotlib."""

    title: str
    colour: str
    outline: str
    marker: str


@dataclass(frozen=True)
class Mark:
    """An event at `step`; `text` is what a pointer on it shows."""

    step: int
    symbol: Symbol
    text: str


_TRIANGLE, _SQUARE = "M0-4.6 4.6 3.6H-4.6Z", "M-3.6-3.6H3.6V3.6H-3.6Z"
_DIAMOND, _DOT = "M0-4.8 4.8 0 0 4.8-4.8 0Z", "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0Z"

_ROLLBACK = Symbol("roll-back", "purple", _SQUARE, "s")
_CHANGE = Symbol("change of settings", "run", _DOT, "o")
SYMBOLS: Mapping[str, Symbol] = MappingProxyType(
    {
        "anomaly": Symbol("anomaly", "red", _TRIANGLE, "^"),
        "rollback": _ROLLBACK,
        "checkpoint_rollback": _ROLLBACK,
        "full_sync": Symbol("full synchronisation", "green", _DIAMOND, "D"),
        "schedule": _CHANGE,
        "return": _CHANGE,
        "adapt": _CHANGE,
        "residuals_cleared": Symbol("residuals cleared", "yellow", _DIAMOND, "d"),
    }
)
_OTHER = Symbol("other event", "muted", _DOT, "o")


def marks(run: Run) -> tuple[Mark, ...]:
    """Every event of `run`."""
    return tuple(
        Mark(int(event["step"]), SYMBOLS.get(event["kind"], _OTHER), f"step {event['step']}: {_what(event)}")
        for event in run.events
    )


def event_head() -> list[str]:
    """Column titles of `event_rows`."""
    return ["step", "event", "why", "settings"]


def event_rows(run: Run) -> list[list[str]]:
    """The last events as rows of text."""
    return [
        [f"{event['step']:,}", _kind(event), str(event.get("reason", "")), _settings(event)]
        for event in run.events[-SHOWN:]
    ]


def _kind(event: Mapping[str, Any]) -> str:
    return str(event["kind"]).replace("_", " ") + (" (dry run)" if event.get("dry_run") else "")


def _what(event: Mapping[str, Any]) -> str:
    return ", ".join(text for text in (_kind(event), str(event.get("reason", "")), _settings(event)) if text)


def _settings(event: Mapping[str, Any]) -> str:
    before, after = event.get("before"), event.get("after")
    return str(after or "") if before == after or not before else f"{before} \N{RIGHTWARDS ARROW} {after}"
