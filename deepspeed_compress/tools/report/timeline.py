"""Events of a run over its steps, and the settings in force."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby
from typing import Any

from deepspeed_compress.config.numbers import span
from deepspeed_compress.tools.report.runs import Run

SHOWN = 300
"""Maximum number of events in the table. The last ones are shown."""


@dataclass(frozen=True)
class Symbol:
    """Symbol of an event. `outline` is an SVG path around (0, 0)."""

    title: str
    colour: str
    outline: str


@dataclass(frozen=True)
class Marker:
    """Event at `step`. `text` is shown when the pointer is over it."""

    step: int
    symbol: Symbol
    text: str


_TRIANGLE, _SQUARE = "M0-4.6 4.6 3.6H-4.6Z", "M-3.6-3.6H3.6V3.6H-3.6Z"
_DIAMOND, _DOT = "M0-4.8 4.8 0 0 4.8-4.8 0Z", "M-3.4 0a3.4 3.4 0 1 0 6.8 0a3.4 3.4 0 1 0-6.8 0Z"

SYMBOLS: Mapping[str, Symbol] = {
    "anomaly": Symbol("anomaly", "red", _TRIANGLE),
    **dict.fromkeys(("rollback", "checkpoint_rollback"), Symbol("roll-back", "purple", _SQUARE)),
    "full_sync": Symbol("full synchronisation", "green", _DIAMOND),
    **dict.fromkeys(("schedule", "return", "adapt", "auto"), Symbol("change of settings", "run", _DOT)),
    "residuals_cleared": Symbol("residuals cleared", "yellow", _DIAMOND),
}
_OTHER = Symbol("other event", "muted", _DOT)


def markers(run: Run) -> tuple[Marker, ...]:
    """Return a marker for every event of `run`, except exchanges of islands, which are routine."""
    return tuple(
        Marker(int(event["step"]), SYMBOLS.get(event["kind"], _OTHER), f"step {event['step']}: {_what(event)}")
        for event in run.events
        if event["kind"] != "islands_exchange"
    )


EVENT_HEAD = ("step", "event", "why", "settings")
"""Column titles of `event_rows`."""


def event_rows(run: Run) -> list[list[str]]:
    """Return the last `SHOWN` events as rows of text."""
    return [
        [f"{event['step']:,}", _kind(event), str(event.get("reason", "")), _settings(event)]
        for event in run.events[-SHOWN:]
    ]


def _kind(event: Mapping[str, Any]) -> str:
    island = f"island {event['island']}: " if "island" in event else ""
    return island + str(event["kind"]).replace("_", " ") + (" (dry run)" if event.get("dry_run") else "")


def _what(event: Mapping[str, Any]) -> str:
    return ", ".join(text for text in (_kind(event), str(event.get("reason", "")), _settings(event)) if text)


def _settings(event: Mapping[str, Any]) -> str:
    before, after = event.get("before"), event.get("after")
    return str(after or "") if before == after or not before else f"{before} \N{RIGHTWARDS ARROW} {after}"


@dataclass(frozen=True)
class SettingsInterval:
    """Interval from step `first` to step `last` with a single setting."""

    setting: str
    first: int
    last: int


@dataclass(frozen=True)
class SettingsTimeline:
    """Settings of a run over its steps."""

    run: str
    intervals: tuple[SettingsInterval, ...]


def settings_timelines(runs: Sequence[Run]) -> list[SettingsTimeline]:
    """Return the timeline of each run that records its settings and sends gradients, to which they apply."""
    recorded = [(run, list(run.column("settings").items())) for run in runs if _sends_gradients(run)]
    return [SettingsTimeline(run.name, _intervals(settings)) for run, settings in recorded if settings]


def _sends_gradients(run: Run) -> bool:
    """Return False if the run sends no gradients because each rank is an island.

    Gradient settings have no effect in such a run.
    """
    sent = run.column("bytes_sent")
    return not sent or any(sent.values())


def _intervals(settings: list[tuple[int, str]]) -> tuple[SettingsInterval, ...]:
    """Return the intervals of equal settings, each from its first to its last measured step."""
    groups = [(setting, [step for step, _ in some]) for setting, some in groupby(settings, key=lambda entry: entry[1])]
    return tuple(SettingsInterval(setting, steps[0], steps[-1]) for setting, steps in groups)


UNCOMPRESSED = "none"
_COLOURS = ("run", "purple", "green", "yellow", "orange", "run-soft", "red")
_RANGES = 6
"""Maximum number of step ranges listed for a setting. The others are only counted."""


def setting_colours(timelines: Sequence[SettingsTimeline]) -> dict[str, str]:
    """Return a color for each setting, the same in every run. Uncompressed steps have the color of the baseline."""
    settings = dict.fromkeys(interval.setting for timeline in reversed(timelines) for interval in timeline.intervals)
    chosen = zip((setting for setting in settings if setting != UNCOMPRESSED), cycle(_COLOURS), strict=False)
    return ({UNCOMPRESSED: "baseline"} if UNCOMPRESSED in settings else {}) | dict(chosen)


def steps_by_setting(timeline: SettingsTimeline) -> dict[str, str]:
    """Return the measured steps of each setting, as text."""
    found: dict[str, list[str]] = {}
    for interval in timeline.intervals:
        found.setdefault(interval.setting, []).append(span(interval.first, interval.last))
    return {setting: f"steps {_listed(steps)}" for setting, steps in found.items()}


def _listed(steps: Sequence[str]) -> str:
    left = len(steps) - _RANGES
    return ", ".join(steps[:_RANGES]) + (f", and {left} more times" if left > 0 else "")
