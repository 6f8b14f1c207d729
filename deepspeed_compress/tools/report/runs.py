"""Runs as reports see them: one table of columns by optimizer step per run, whichever program wrote its files."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed_compress.config.numbers import span
from deepspeed_compress.errors import DataError
from deepspeed_compress.tools.outputs.report import printable
from deepspeed_compress.tools.run_directory import METRICS, RunDirectory, read_directory

Columns = dict[str, dict[int, Any]]

_LOGGED = "compression_"
"""Prefix of this package's metrics in the logs of Trainer."""


def _columns(lines: Iterable[Mapping[str, Any]], names: Mapping[str, str] = MappingProxyType({})) -> Columns:
    """Return the values of `lines` by step, without those that are null, with columns renamed by `names`."""
    columns: Columns = {}
    for line in lines:
        for key, value in line.items():
            if value is not None and key not in ("step", "run"):
                columns.setdefault(names.get(key, key), {})[int(line["step"])] = value
    return columns


def _metrics(files: RunDirectory) -> Columns:
    columns = _columns(files.metrics, {"step_time_s": "step_ms"})
    columns["step_ms"] = {step: 1e3 * seconds for step, seconds in columns.get("step_ms", {}).items()}
    return columns


def _trainer_log(files: RunDirectory) -> Columns:
    return _columns(files.trainer_log, {"loss": "train_loss", "train_loss": "mean_train_loss"})


SOURCES: tuple[Callable[[RunDirectory], Columns], ...] = (
    _metrics,
    lambda files: _columns(files.statistics),
    lambda files: _columns(files.versions),
    _trainer_log,
    # Means over the steps between two logs, for runs that have no statistics per step.
    lambda files: {
        name.removeprefix(_LOGGED): values for name, values in _trainer_log(files).items() if name.startswith(_LOGGED)
    },
    # Losses of single steps, which the guard recorded.
    lambda files: {
        "train_loss": {line["step"]: line["loss"] for line in files.statistics if line.get("loss") is not None}
    },
)
"""Sources in order of preference. Each column is taken as a whole from the first source that has it."""


@dataclass(frozen=True)
class Run:
    """Run with its columns and events.

    Attributes:
        name: Name to display.
        role: "run" or "baseline". This is also the name of its color.
        files: Files of the run.
        columns: Values by step, in ascending order. Columns are named as in `StepStatistics`.
        events: Events in order of their steps.
    """

    name: str
    role: str
    files: RunDirectory
    columns: Columns
    events: tuple[Mapping[str, Any], ...]

    def column(self, key: str) -> dict[int, Any]:
        """Return the values of a column by step, in ascending order; empty if no file of the run has them."""
        return self.columns.get(key, {})

    def until(self, last: int) -> "Run":
        """Return this run without the values of steps after `last`."""
        columns = {
            key: {step: one for step, one in column.items() if step <= last} for key, column in self.columns.items()
        }
        return replace(self, columns=columns)

    @property
    def last_step(self) -> int:
        return self.span[1]

    @cached_property
    def span(self) -> tuple[int, int]:
        """Return the first and last step of all values and events. There is at least one."""
        steps = {int(event["step"]) for event in self.events}
        steps.update(*self.columns.values())
        return min(steps), max(steps)

    @property
    def status(self) -> str:
        """Return whether the run has finished, as far as its files show."""
        trainer, steps = self.files.trainer, self.last_step
        done, planned = ((trainer or {}).get(key) for key in ("global_step", "max_steps"))
        if self.files.summary or (planned and done is not None and done >= planned):
            return f"finished, {steps:,} steps"
        if planned:
            return f"still running: step {steps:,} of {planned:,}"
        if (self.files.directory / METRICS).is_file():
            return f"still running: {steps:,} steps so far"
        return f"{steps:,} steps so far (its files do not tell whether it has ended)"


def load_runs(run_dir: Path, baseline: Path | None) -> list[Run]:
    """Return the baseline, if any, and then the run. Neither has to be finished.

    Raises:
        DataError: A directory does not hold a run.
    """
    if baseline is None:
        return [_load(run_dir, run_dir.resolve().name, "run")]
    former, name = _distinct_names(baseline.resolve(), run_dir.resolve())
    return [_load(baseline, former, "baseline"), _load(run_dir, name, "run")]


def _distinct_names(first: Path, second: Path) -> tuple[str, str]:
    """Return the shortest trailing parts of two paths that differ, such as `none/seed0` and `int4/seed0`."""
    for count in range(1, min(len(first.parts), len(second.parts))):
        names = "/".join(first.parts[-count:]), "/".join(second.parts[-count:])
        if names[0] != names[1]:
            return names
    return str(first), str(second)


def _load(directory: Path, name: str, role: str) -> Run:
    files = read_directory(directory)
    columns: Columns = {}
    for source in SOURCES:
        columns = source(files) | {key: values for key, values in columns.items() if values}
    columns = {key: dict(sorted(values.items())) for key, values in columns.items()}
    if not any(columns.values()):
        names = "metrics.jsonl, compression.jsonl, rollout.jsonl, trainer_state.json, also in checkpoint-*"
        remedy = "give the output directory of a run, or the monitor.path of its section"
        raise DataError(f"{directory}: holds no run (no {names}); {remedy}")
    events = sorted(files.events or (), key=lambda event: int(event["step"]))
    return Run(printable(name), role, files, columns, tuple(events))


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
    shown = [event for event in run.events if event["kind"] != "islands_exchange"]
    texts = [f"step {event['step']}: {', '.join(filter(None, _texts(event)))}" for event in shown]
    return tuple(
        Marker(int(event["step"]), SYMBOLS.get(event["kind"], _OTHER), text)
        for event, text in zip(shown, texts, strict=True)
    )


def event_rows(run: Run) -> list[list[str]]:
    """Return the last `SHOWN` events as rows of text: step, kind, reason and change of settings."""
    return [[f"{event['step']:,}", *_texts(event)] for event in run.events[-SHOWN:]]


def _texts(event: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the kind of an event, its reason, and its change of settings."""
    island = f"island {event['island']}: " if "island" in event else ""
    kind = island + str(event["kind"]).replace("_", " ") + (" (dry run)" if event.get("dry_run") else "")
    before, after = event.get("before"), event.get("after")
    changed = bool(before) and before != after
    return kind, str(event.get("reason", "")), f"{before} \N{RIGHTWARDS ARROW} {after}" if changed else str(after or "")


@dataclass(frozen=True)
class SettingsInterval:
    """Interval from step `first` to step `last` with a single setting."""

    setting: str
    first: int
    last: int


Timeline = tuple[SettingsInterval, ...]
"""Settings of a run over its steps."""


def settings_timelines(runs: Sequence[Run]) -> dict[str, Timeline]:
    """Return the timelines of the runs that record their settings and send gradients, to which they apply, by name."""
    # If each rank is an island, the run sends no gradients.
    sending = [run for run in runs if not run.column("bytes_sent") or any(run.column("bytes_sent").values())]
    recorded = [(run.name, list(run.column("settings").items())) for run in sending]
    return {name: _intervals(settings) for name, settings in recorded if settings}


def _intervals(settings: list[tuple[int, str]]) -> Timeline:
    """Return the intervals of equal settings, each from its first to its last measured step."""
    groups = [(setting, [step for step, _ in some]) for setting, some in groupby(settings, key=lambda entry: entry[1])]
    return tuple(SettingsInterval(setting, steps[0], steps[-1]) for setting, steps in groups)


UNCOMPRESSED = "none"
_COLOURS = ("run", "purple", "green", "yellow", "orange", "run-soft", "red")
_RANGES = 6
"""Maximum number of step ranges listed for a setting. The others are only counted."""


def setting_colours(timelines: Mapping[str, Timeline]) -> dict[str, str]:
    """Return a color for each setting, the same in every run. Uncompressed steps have the color of the baseline."""
    settings = dict.fromkeys(interval.setting for timeline in reversed([*timelines.values()]) for interval in timeline)
    chosen = zip((setting for setting in settings if setting != UNCOMPRESSED), cycle(_COLOURS), strict=False)
    return ({UNCOMPRESSED: "baseline"} if UNCOMPRESSED in settings else {}) | dict(chosen)


def steps_by_setting(timeline: Timeline) -> dict[str, str]:
    """Return the measured steps of each setting, as text."""
    found: dict[str, list[str]] = {}
    for interval in timeline:
        found.setdefault(interval.setting, []).append(span(interval.first, interval.last))
    left = {setting: len(steps) - _RANGES for setting, steps in found.items()}
    more = {setting: f", and {count} more times" if count > 0 else "" for setting, count in left.items()}
    return {setting: f"steps {', '.join(steps[:_RANGES])}{more[setting]}" for setting, steps in found.items()}
