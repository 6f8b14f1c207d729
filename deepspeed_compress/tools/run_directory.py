"""Reading of the files that a run leaves in its directories, shared by all commands that read runs.

Several runs may have written into a directory, and so may several processes of one resumed run. The last run is used,
or the one that summary.json names. If a process continued from a checkpoint, earlier lines about steps after that
checkpoint are dropped. Lines name their part of a run in "run" (`monitor.journal.Part`). Lines of older versions do
not, so only their order is known.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, takewhile
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import DataError
from deepspeed_compress.monitor import STATISTICS, VERSIONS
from deepspeed_compress.monitor.events import CONFIGURATION, EVENTS
from deepspeed_compress.monitor.journal import Part
from deepspeed_compress.tools import run_checks
from deepspeed_compress.tools.line_files import Entries, Entry, LineIndex, index_lines, loads
from deepspeed_compress.tools.outputs.printable import printable

METRICS, SUMMARY, TRAINER = "metrics.jsonl", "summary.json", "trainer_state.json"
RESULTS = ("train_results.json", "all_results.json")
"""Files of Trainer's `save_metrics`, in order of preference."""
LARGEST_OBJECT = 1 << 26
"""Maximum bytes of a file that holds one JSON object."""

Line = Mapping[str, Any]


@dataclass(frozen=True)
class RunDirectory:
    """Files of a run, finished or not. A file that does not exist is None or empty.

    Attributes:
        directory: Output directory of the run.
        monitor: Directory of the statistics, which may differ from `directory`.
        statistics: Lines of compression.jsonl, one per measured step, or a sample if there are many.
        measured: Number of measured steps, of which `statistics` may be a sample.
        events: Lines of events.jsonl in order, grouped by island ("island"), or a sample if there are many. None for
            runs of a version that did not write events.
        versions: Lines of rollout.jsonl, one per version for rollout workers, or a sample if there are many.
        metrics: Lines of metrics.jsonl, or a sample if there are many.
        summary: Content of summary.json.
        ds_config: DeepSpeed configuration.
        trainer: State of Hugging Face Trainer at the end of the run, or at its newest checkpoint.
        results: Figures of the whole run that Trainer's `save_metrics` writes.
    """

    directory: Path
    monitor: Path
    statistics: tuple[Line, ...]
    measured: int
    events: tuple[Line, ...] | None
    versions: tuple[Line, ...]
    metrics: tuple[Line, ...]
    summary: Line | None
    ds_config: Line | None
    trainer: Line | None
    results: Line | None

    @property
    def trainer_log(self) -> list[Line]:
        """Return the numbers in the log of Hugging Face Trainer. Figures of the whole run belong to the last step."""
        entries = [*((self.trainer or {}).get("log_history") or [])]
        if self.trainer and self.results:
            entries.append({**self.results, "step": self.trainer.get("global_step")})
        return [
            {key: value for key, value in entry.items() if run_checks.is_number(value)}
            for entry in entries
            if type(entry.get("step")) is int and 0 <= entry["step"] < 2**53
        ]


def read_directory(directory: Path, config: Line | None = None) -> RunDirectory:
    """Read the files of a run. `config` replaces the configuration that the run left.

    Raises:
        DataError: A file is damaged. The message names the file and the line.
    """
    summary = _object(directory / SUMMARY, run_checks.SUMMARY_FIELDS)
    named = Path((summary or {}).get("monitor_path") or directory)
    ds_config = config if config is not None else _first_object(directory / CONFIGURATION, named / CONFIGURATION)
    monitor = _monitor([directory, named, *_configured(ds_config)])
    index, events = index_lines(monitor / STATISTICS, run_checks.STATISTIC), _event_files(monitor)
    versions = index_lines(monitor / VERSIONS, run_checks.METRIC)
    # Versions may be written before the first step is measured.
    run = (summary or {}).get("run") or _last_run(index if index.entries else versions)
    parts = _parts_of(run, [index, *events, versions])
    entries = _drop_replaced(_valid(index, parts, run), _replaces_step)
    statistics = tuple(index.load_sample(entries))
    # The file is created with the first event. Without it, a version that records settings has had no event.
    has_events = (monitor / EVENTS).is_file() or any("settings" in line for line in statistics)
    return RunDirectory(
        directory,
        monitor,
        statistics,
        len(entries),
        _events(events, parts, run) if has_events else None,
        tuple(versions.load_sample(_drop_replaced(_valid(versions, parts, run), _replaces_step))),
        read_metrics(directory, sample=True),
        summary,
        ds_config if ds_config is not None else _object(monitor / CONFIGURATION),
        _trainer(directory, _last_possible_step(entries)),
        _first_object(*(directory / name for name in RESULTS)),
    )


def read_statistics(directory: Path, run: str | None = None) -> tuple[Line, ...]:
    """Return all valid lines of compression.jsonl in `directory` that belong to `run`, or else to the last run."""
    index = index_lines(directory / STATISTICS, run_checks.STATISTIC)
    run = run or _last_run(index)
    parts = _parts_of(run, [index, *_event_files(directory)])
    return tuple(index.load(_drop_replaced(_valid(index, parts, run), _replaces_step)))


def read_metrics(directory: Path, sample: bool = False) -> tuple[Line, ...]:
    """Return the valid lines of metrics.jsonl in `directory`, or a sample if requested and there are many."""
    index = index_lines(directory / METRICS, run_checks.METRIC)
    entries = _drop_replaced(index.entries, _replaces_figure)
    return tuple(index.load_sample(entries) if sample else index.load(entries))


def _event_files(directory: Path) -> list[LineIndex]:
    """Return the events of all islands, those of the first island first. Each other island has its own file."""
    files = [directory / EVENTS, *sorted(directory.glob(f"island_*/{EVENTS}"))]
    return [index_lines(file, run_checks.EVENT) for file in files]


def _events(files: Iterable[LineIndex], parts: Sequence[Part], run: str | None) -> tuple[Line, ...]:
    """Return the valid events of `run` in `files`, or a sample of each file if there are many."""
    return tuple(line for file in files for line in file.load_sample(Entries(_valid(file, parts, run))))


def _drop_replaced(entries: Iterable[Entry], replaces: Callable[[Entry, Entries], bool]) -> Entries:
    """Return `entries` without those that a later one replaces, which `replaces` tells for the last one kept."""
    kept = Entries()
    for entry in entries:
        while kept and replaces(entry, kept):
            kept.pop()
        kept.append(entry)
    return kept


def _replaces_step(entry: Entry, kept: Entries) -> bool:
    """Return True if the last line of those kept belongs to the step of `entry`, or to a later one."""
    return kept[-1].step >= entry.step


def _replaces_figure(entry: Entry, kept: Entries) -> bool:
    """Return the same for a file in which several lines of one step may have different figures."""
    return kept[-1].step > entry.step or _repeats(entry, kept)


def _repeats(entry: Entry, kept: Entries) -> bool:
    """Return True if a kept line of the same step has a figure that the line of `entry` also has."""
    same_step = takewhile(lambda before: before.step == entry.step, reversed(kept))
    return any((before.keys & entry.keys) - {"step"} for before in same_step)


def _valid(index: LineIndex, parts: Sequence[Part], run: str | None) -> Iterator[Entry]:
    """Yield the lines of `run` whose steps no later one of its `parts` has repeated."""
    last = {part: _last_step(part, parts, run) for part in _known_parts(index)}
    return (entry for entry in index.entries if entry.step <= last[entry.part])


def _known_parts(index: LineIndex) -> set[Part | None]:
    return {entry.part for entry in index.entries}


def _last_step(part: Part | None, parts: Sequence[Part], run: str | None) -> float:
    """Return the last step for which lines of `part` are valid, or -1 if it is not a part of `run`."""
    if part is None or part.id != run:
        return float("inf") if part is None and run is None else -1.0
    return min((other.since for other in parts if other.started > part.started), default=float("inf"))


def _parts_of(run: str | None, files: Iterable[LineIndex]) -> list[Part]:
    """Return the parts of `run` that occur in lines of `files`."""
    return [part for file in files for part in _known_parts(file) if part is not None and part.id == run]


def _last_run(index: LineIndex) -> str | None:
    part = index.entries[-1].part if index.entries else None
    return None if part is None else part.id


def _configured(ds_config: Line | None) -> list[Path]:
    section = (ds_config or {}).get(SECTION)
    monitor = section.get("monitor") if isinstance(section, Mapping) else None
    path = monitor.get("path") if isinstance(monitor, Mapping) else None
    return [Path(path)] if path and isinstance(path, str) else []


def _monitor(places: Sequence[Path]) -> Path:
    """Return the directory of the statistics. They may have been moved together with the run."""
    return next((place for place in places if _is_file(place / STATISTICS)), places[0])


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        # The name contains a null byte or is too long.
        return False


def _trainer(directory: Path, last_step: float) -> Line | None:
    """Return Trainer's newest state up to step `last_step`. Older, longer runs may have left checkpoints too."""
    files = [directory / TRAINER, *directory.glob(f"checkpoint-*/{TRAINER}")]
    states = [state for file in files if (state := _object(file, run_checks.TRAINER_STATE))]
    ours = [state for state in states if (state.get("global_step") or 0) <= last_step]
    return max(ours, key=lambda state: state.get("global_step") or 0, default=None)


def _last_possible_step(entries: Entries) -> float:
    """Return the last step that the run can have made, or infinity if no line states which run it belongs to."""
    first = entries[0].part if entries else None
    if first is None:
        return float("inf")
    steps = chain([first.since], (entry.step for entry in entries))
    return float(entries[-1].step + max(after - before for before, after in pairwise(steps)) - 1)


def _object(file: Path, fields: Mapping[str, run_checks.Field] | None = None) -> dict[str, Any] | None:
    """Return the object in a JSON file whose `fields` are valid, or None if there is no file.

    Raises:
        DataError: The file is too large, is not a JSON object, or has an invalid field.
    """
    if not _is_file(file):
        return None
    try:
        with file.open("rb") as stream:
            text = stream.read(LARGEST_OBJECT + 1)
        if len(text) > LARGEST_OBJECT:
            raise ValueError(f"more than {LARGEST_OBJECT:,} bytes")
        value = loads(text)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error}); give the directory of a run") from None
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({printable(str(error))}); restore the file, or remove it") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: {type(value).__name__} (allowed: an object); restore the file, or remove it")
    problem = run_checks.find_problem(fields or {}, value)
    if problem:
        raise DataError(f"{file}: {printable(problem)}; restore the file, or remove it")
    return value


def _first_object(*files: Path) -> dict[str, Any] | None:
    """Return the first object with any keys in JSON `files`, or None if there is none."""
    return next((found for file in files if (found := _object(file))), None)


def read_summary(directory: Path) -> dict[str, Any]:
    """Return the content of summary.json of a run.

    Raises:
        DataError: The run is not finished, or `directory` does not hold a run.
    """
    found = _object(directory / SUMMARY, run_checks.SUMMARY_FIELDS)
    if found is None:
        raise DataError(f"{directory}: contains no {SUMMARY}; pass the --output-dir of a finished run")
    return found
