"""What a run has left in its directories, read in one way by all who look at runs.

A directory may have been written by several runs one after the other, and by several processes of one that was resumed.
What counts is the last run, or the one that summary.json names, and of it the steps that later ones stand on: where a
process went on from a checkpoint, what came after that checkpoint before is abandoned. Lines say what they are of in
"run" (`monitor.Part`); those of older versions do not, and only their order tells.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import DataError
from deepspeed_compress.monitor import CONFIGURATION, EVENTS, STATISTICS

__all__ = [
    "METRICS",
    "STATISTICS",
    "SUMMARY",
    "Line",
    "RunDirectory",
    "in_order",
    "read_directory",
    "read_lines",
    "read_metrics",
    "read_statistics",
    "read_summary",
]

METRICS, SUMMARY, TRAINER = "metrics.jsonl", "summary.json", "trainer_state.json"

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunDirectory:
    """A run, finished or not. `monitor`: the directory of the statistics, which may be another one. None: not there.

    `statistics`: one line a measured step. `events`: in their order, those of each island ("island") for themselves;
    None for runs of a version that wrote none.
    `trainer`: state of Hugging Face Trainer at the end of the run, or at its newest checkpoint.
    """

    directory: Path
    monitor: Path
    statistics: tuple[Line, ...]
    events: tuple[Line, ...] | None
    metrics: tuple[Line, ...]
    summary: Line | None
    ds_config: Line | None
    trainer: Line | None

    @property
    def trainer_log(self) -> list[Line]:
        return [line for line in (self.trainer or {}).get("log_history", []) if "step" in line]


def read_directory(directory: Path, config: Line | None = None) -> RunDirectory:
    """`config` in place of what the run left of its configuration. Raises DataError for files that are damaged."""
    summary = _object(directory / SUMMARY)
    named = Path((summary or {}).get("monitor_path") or directory)
    ds_config = config or next(
        (found for place in (directory, named) if (found := _object(place / CONFIGURATION))), None
    )
    monitor = _monitor([directory, named, *_configured(ds_config)])
    lines, events = _whole(monitor / STATISTICS), _events(monitor)
    run = (summary or {}).get("run") or _run(lines[-1] if lines else {})
    statistics = _standing(lines, [*lines, *events], run)
    # The file is made with the first event, so a run that tells its settings and has none had no event.
    told = (monitor / EVENTS).is_file() or any("settings" in line for line in statistics)
    return RunDirectory(
        directory,
        monitor,
        in_order(statistics),
        tuple(_standing(events, [*lines, *events], run)) if told else None,
        read_metrics(directory),
        summary,
        ds_config or _object(monitor / CONFIGURATION),
        _trainer(directory, in_order(statistics)),
    )


def read_statistics(directory: Path, run: str | None = None) -> tuple[Line, ...]:
    """The lines of compression.jsonl in `directory` that count: of `run`, else of the last run."""
    lines, events = _whole(directory / STATISTICS), _events(directory)
    return in_order(_standing(lines, [*lines, *events], run or _run(lines[-1] if lines else {})))


def _events(directory: Path) -> list[dict[str, Any]]:
    """Of all islands, those of the first one first; each of the others has a file of its own."""
    files = [directory / EVENTS, *sorted(directory.glob(f"island_*/{EVENTS}"))]
    return [line for file in files for line in _whole(file)]


def read_metrics(directory: Path) -> tuple[Line, ...]:
    """The lines of metrics.jsonl in `directory` that count."""
    return tuple(_together(_whole(directory / METRICS)))


def in_order(lines: Iterable[Line]) -> tuple[Line, ...]:
    """Later lines stand in for earlier ones of the same or later steps."""
    kept: list[Line] = []
    for line in lines:
        while kept and kept[-1]["step"] >= line["step"]:
            kept.pop()
        kept.append(line)
    return tuple(kept)


def _together(lines: Iterable[Line]) -> list[Line]:
    """The same where several lines may be of one step, as long as they tell different figures of it."""
    kept: list[Line] = []
    for line in lines:
        while kept and (kept[-1]["step"] > line["step"] or _repeats(line, kept)):
            kept.pop()
        kept.append(line)
    return kept


def _repeats(line: Line, kept: Sequence[Line]) -> bool:
    same = takewhile(lambda before: before["step"] == line["step"], reversed(kept))
    return any(before.keys() & line.keys() > {"step"} for before in same)


def _standing(lines: Sequence[Line], known: Sequence[Line], run: str | None) -> list[Line]:
    """Of `lines` those of `run` that no later part of it, of those in `known`, has left behind."""
    parts = {(line["run"]["started"], line["run"]["since"]) for line in known if run and _run(line) == run}
    return [line for line in lines if _run(line) == run and not (run and _abandoned(line, parts))]


def _abandoned(line: Line, parts: Iterable[tuple[str, int]]) -> bool:
    return any(started > line["run"]["started"] and since < line["step"] for started, since in parts)


def _run(line: Line) -> str | None:
    found: str | None = (line.get("run") or {}).get("id")
    return found


def _configured(ds_config: Line | None) -> list[Path]:
    section = (ds_config or {}).get(SECTION)
    monitor = section.get("monitor") if isinstance(section, Mapping) else None
    path = monitor.get("path") if isinstance(monitor, Mapping) else None
    return [Path(path)] if path else []


def _monitor(places: Sequence[Path]) -> Path:
    """Where the statistics are: a run may have moved with them."""
    return next((place for place in places if (place / STATISTICS).is_file()), places[0])


def _trainer(directory: Path, statistics: Sequence[Line]) -> Line | None:
    """The state that is farthest, and no farther than the run: a shorter run leaves checkpoints of a longer one."""
    files = [directory / TRAINER, *directory.glob(f"checkpoint-*/{TRAINER}")]
    states = [state for file in files if (state := _object(file))]
    ours = [state for state in states if int(state.get("global_step", 0)) <= _farthest(statistics)]
    return max(ours, key=lambda state: int(state.get("global_step", 0)), default=None)


def _farthest(statistics: Sequence[Line]) -> float:
    """The last step that the run can have made, by what was measured of it; infinite where no line names its run."""
    if not statistics or _run(statistics[0]) is None:
        return float("inf")
    steps = [statistics[0]["run"]["since"], *(line["step"] for line in statistics)]
    return float(steps[-1] + max(after - before for before, after in pairwise(steps)) - 1)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a .jsonl file, none when it is missing; a last line cut short by a crash is left out."""
    # What a disk has damaged is told by its line.
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(json.loads(line))
        except (ValueError, RecursionError):
            if number < len(lines):
                raise DataError(f"{file}:{number}: not JSON: {line[:60]!r}") from None
    return parsed


def _whole(file: Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl file, which must be objects with a step."""
    lines = read_lines(file)
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise DataError(f'{file}:{number}: no "step" (allowed: an object with one); remove the line')
        if not _names_run(line.get("run")):
            raise DataError(f'{file}:{number}: "run" names no run (allowed: as monitor writes it); remove the line')
    return lines


def _names_run(run: object) -> bool:
    """Return True for what `monitor.Part` writes, and for lines of older versions, which have none."""
    texts = ("id", "started")
    return not run or (
        isinstance(run, dict)
        and all(isinstance(run.get(name), str) for name in texts)
        and isinstance(run.get("since"), int)
    )


def _object(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None when there is no file. Raises DataError for anything else."""
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not JSON ({error}); restore the file, or remove it") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: {type(value).__name__} (allowed: an object); restore the file, or remove it")
    return value


def read_summary(directory: Path) -> dict[str, Any]:
    """summary.json of a run. Raises DataError when the run is not finished, or `directory` is none."""
    found = _object(directory / SUMMARY)
    if found is None:
        raise DataError(f"{directory}: holds no {SUMMARY}; give the --output-dir of a finished run")
    return found
