"""Reading of the files that a run leaves in its directories, shared by all commands that read runs.

Several runs may have written into a directory, and so may several processes of one resumed run. The last run is used,
or the one that summary.json names. If a process continued from a checkpoint, earlier lines about steps after that
checkpoint are dropped. Lines name their part of a run in "run" (`monitor.journal.Part`). Lines of other programs do
not, so only their order is known. Contents may have been edited, cut off or damaged.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import DataError
from deepspeed_compress.monitor import STATISTICS, VERSIONS
from deepspeed_compress.monitor.journal import CONFIGURATION, EVENTS, Part
from deepspeed_compress.safe_files import LARGEST_TEXT, open_regular
from deepspeed_compress.tools.outputs.report import printable

Check = Callable[[dict[str, Any]], str]
"""Function that returns what is wrong with the object on a line, or ""."""
Field = tuple[str, Callable[[Any], bool]]
"""Description of what is allowed, and the predicate that checks it."""
LARGEST = 1e100
"""Largest magnitude of a number. Sums of squares of larger ones would overflow."""
_SHOWN = 60


def is_number(value: Any) -> bool:
    """Return True for None and for finite numbers of reasonable magnitude."""
    return value is None or (type(value) in (int, float) and abs(value) <= LARGEST)


def is_step(value: Any) -> bool:
    """Return True for an optimizer step."""
    return type(value) is int and 0 <= value < 2**53


def _optional(allowed: str, fits: Callable[[Any], bool]) -> Field:
    """Return the check of a field that may be None."""
    return allowed, lambda value: value is None or fits(value)


_NUMBER: Field = ("a number", is_number)
_TEXT = _optional("a string", lambda value: isinstance(value, str))
_COUNT = _optional("an integer", lambda value: type(value) is int and abs(value) < 2**53)
_FLAG = _optional("true or false", lambda value: isinstance(value, bool))
_ANYTHING: Field = ("anything", lambda value: True)

STATISTIC_FIELDS: Mapping[str, Field] = {"method": _TEXT, "settings": _TEXT, "run": _ANYTHING}
EVENT_FIELDS: Mapping[str, Field] = {
    "kind": ("a string", lambda value: isinstance(value, str)),
    "reason": _TEXT,
    "before": _TEXT,
    "after": _TEXT,
    "evidence": _optional(
        "an object of numbers", lambda value: isinstance(value, dict) and all(map(is_number, value.values()))
    ),
    "island": _COUNT,
    "dry_run": _FLAG,
}
SUMMARY_FIELDS: Mapping[str, Field] = {
    "monitor_path": _TEXT,
    "run": _TEXT,
    "tokens_per_s": _NUMBER,
    "parameters": _COUNT,
    "world_size": _COUNT,
    "eval_loss": _NUMBER,
}
TRAINER_FIELDS: Mapping[str, Field] = {
    "global_step": _COUNT,
    "max_steps": _COUNT,
    "log_history": _optional(
        "a list of objects", lambda value: isinstance(value, list) and all(isinstance(one, dict) for one in value)
    ),
}


def find_problem(fields: Mapping[str, Field], values: Mapping[str, Any], others: Field = _ANYTHING) -> str:
    """Return what is wrong with the first of `values` that does not satisfy `fields`, or "".

    `others` is the check of fields that `fields` does not name. A missing field of `fields` counts as None.
    """
    missing = ((name, None) for name in fields if name not in values)
    for name, value in chain(values.items(), missing):
        allowed, fits = fields.get(name, others)
        if not fits(value):
            return f"{name!r} is {repr(value)[:_SHOWN]} (allowed: {allowed})"
    return ""


STATISTIC: Check = partial(find_problem, STATISTIC_FIELDS, others=_NUMBER)
"""Check of a line of compression.jsonl: figures must be numbers."""
METRIC: Check = partial(find_problem, MappingProxyType({"run": _ANYTHING}), others=_NUMBER)
"""Check of a line of metrics.jsonl: figures must be numbers."""
EVENT: Check = partial(find_problem, EVENT_FIELDS)
"""Check of a line of events.jsonl."""


def _line_problem(line: Any) -> str:
    """Return what is wrong with `line` as a line of any of these files, or ""."""
    if not isinstance(line, dict) or not is_step(line.get("step")):
        return '"step" is missing or invalid (allowed: an object with "step", an integer from 0)'
    run = line.get("run")
    if run is None:
        return ""
    texts = isinstance(run, dict) and isinstance(run.get("id"), str) and isinstance(run.get("started"), str)
    if not texts or type(run.get("since")) is not int or abs(run["since"]) >= 2**53:
        return '"run" is not a part of a run (allowed: an object with "id", "started" and "since")'
    return ""


def read_lines(file: Path, check: Check = lambda line: "") -> list[dict[str, Any]]:
    """Return the objects of a .jsonl file, none if there is no file. A last line truncated by a crash is left out.

    Raises:
        DataError: The file is too large, or a line is wrong. The message names the file and the line.
    """
    texts = (read_content(file) if file.exists() else b"").removesuffix(b"\n").split(b"\n")
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            line = _parse(text)
        except ValueError as error:
            if number == len(texts):
                break
            shown = printable(text[:_SHOWN].decode("utf-8", "replace"))
            raise DataError(f"{file}:{number}: not JSON ({printable(str(error))}): {shown!r}") from None
        problem = _line_problem(line) or check(line)
        if problem:
            raise DataError(f"{file}:{number}: {printable(problem)}; correct the line, or remove it")
        # Thousands of lines have the same keys.
        lines.append({sys.intern(key): value for key, value in line.items()})
    return lines


def read_object(file: Path, fields: Mapping[str, Field] = MappingProxyType({})) -> dict[str, Any] | None:
    """Return the object in a JSON file whose `fields` are valid, or None if there is no file.

    Raises:
        DataError: The file is too large, is not a JSON object, or has an invalid field.
    """
    if not is_file(file):
        return None
    try:
        value = _parse(read_content(file))
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({printable(str(error))}); restore the file, or remove it") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: {type(value).__name__} (allowed: an object); restore the file, or remove it")
    problem = find_problem(fields, value)
    if problem:
        raise DataError(f"{file}: {printable(problem)}; restore the file, or remove it")
    return value


def is_file(path: Path) -> bool:
    """Return True if `path`, which a file of the run may name, is that of a file."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        # The name contains a null byte or is too long.
        return False


def read_content(file: Path) -> bytes:
    """Return the content of a file.

    Raises:
        DataError: The file is too large, is not a regular file, or cannot be read.
    """
    try:
        with open_regular(file) as stream:
            content = stream.read(LARGEST_TEXT + 1)
    except OSError as error:
        reason = error.strerror or str(error).removeprefix(f"{file} ")
        raise DataError(f"{file}: cannot be read ({reason}); give the directory of a run") from None
    if len(content) > LARGEST_TEXT:
        raise DataError(
            f"{file}: has more than {LARGEST_TEXT:,} bytes; write fewer lines, as with a larger monitor.every"
        )
    return content


_DECODER = json.JSONDecoder(parse_constant=lambda name: None)


def _parse(text: bytes) -> Any:
    """Parse JSON, with None in place of NaN and infinity.

    Raises:
        ValueError: `text` is not JSON.
    """
    try:
        return _DECODER.decode(text.decode("utf-8", "replace"))
    except RecursionError:
        raise ValueError("nested too deeply") from None


METRICS, SUMMARY, TRAINER = "metrics.jsonl", "summary.json", "trainer_state.json"
RESULTS = ("train_results.json", "all_results.json")
"""Files of Trainer's `save_metrics`, in order of preference."""

Line = Mapping[str, Any]
Lines = tuple[Line, ...]


@dataclass(frozen=True)
class RunDirectory:
    """Files of a run, finished or not. A file that does not exist is None or empty.

    Attributes:
        directory: Output directory of the run.
        monitor: Directory of the statistics, which may differ from `directory`.
        statistics: Lines of compression.jsonl, one per measured step.
        events: Lines of events.jsonl in order, grouped by island ("island"). None for runs that did not write events.
        versions: Lines of rollout.jsonl, one per version for rollout workers.
        metrics: Lines of metrics.jsonl.
        summary: Content of summary.json.
        ds_config: DeepSpeed configuration.
        trainer: State of Hugging Face Trainer at the end of the run, or at its newest checkpoint.
        results: Figures of the whole run that Trainer's `save_metrics` writes.
    """

    directory: Path
    monitor: Path
    statistics: Lines
    events: Lines | None
    versions: Lines
    metrics: Lines
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
            {key: value for key, value in entry.items() if is_number(value)}
            for entry in entries
            if is_step(entry.get("step"))
        ]


def read_directory(directory: Path, config: Line | None = None) -> RunDirectory:
    """Read the files of a run. `config` replaces the configuration that the run left.

    Raises:
        DataError: A file is damaged. The message names the file and the line.
    """
    summary = read_object(directory / SUMMARY, SUMMARY_FIELDS)
    named = Path((summary or {}).get("monitor_path") or directory)
    ds_config = config if config is not None else _first_object(directory / CONFIGURATION, named / CONFIGURATION)
    monitor = _monitor([directory, named, *_configured(ds_config)])
    statistics, events = read_lines(monitor / STATISTICS, STATISTIC), _all_events(monitor)
    versions = read_lines(monitor / VERSIONS, METRIC)
    # Versions may be written before the first step is measured.
    run = (summary or {}).get("run") or _last_run(statistics or versions)
    parts = _parts_of(run, [*statistics, *events, *versions])
    measured = drop_replaced(_valid(statistics, parts, run))
    # The file is created with the first event. Without it, a run that records settings has had no event.
    has_events = (monitor / EVENTS).is_file() or any("settings" in line for line in measured)
    return RunDirectory(
        directory,
        monitor,
        measured,
        tuple(_valid(events, parts, run)) if has_events else None,
        drop_replaced(_valid(versions, parts, run)),
        read_metrics(directory),
        summary,
        ds_config if ds_config is not None else read_object(monitor / CONFIGURATION),
        _trainer(directory, _last_possible_step(measured)),
        _first_object(*(directory / name for name in RESULTS)),
    )


def read_statistics(directory: Path, run: str | None = None) -> Lines:
    """Return all valid lines of compression.jsonl in `directory` that belong to `run`, or else to the last run."""
    lines = read_lines(directory / STATISTICS, STATISTIC)
    run = run or _last_run(lines)
    parts = _parts_of(run, [*lines, *_all_events(directory)])
    return drop_replaced(_valid(lines, parts, run))


def read_metrics(directory: Path) -> Lines:
    """Return the valid lines of metrics.jsonl in `directory`."""
    return drop_replaced(read_lines(directory / METRICS, METRIC), _replaces_figure)


def _all_events(directory: Path) -> list[Line]:
    """Return the events of all islands, those of the first island first. Each other island has its own file."""
    files = [directory / EVENTS, *sorted(directory.glob(f"island_*/{EVENTS}"))]
    return [line for file in files for line in read_lines(file, EVENT)]


def _replaces_step(line: Line, kept: Sequence[Line]) -> bool:
    """Return True if the last line of those kept belongs to the step of `line`, or to a later one."""
    return bool(kept[-1]["step"] >= line["step"])


def drop_replaced(lines: Iterable[Line], replaces: Callable[[Line, Sequence[Line]], bool] = _replaces_step) -> Lines:
    """Return `lines` without those that a later one replaces, which `replaces` tells for the last one kept."""
    kept: list[Line] = []
    for line in lines:
        while kept and replaces(line, kept):
            kept.pop()
        kept.append(line)
    return tuple(kept)


def _replaces_figure(line: Line, kept: Sequence[Line]) -> bool:
    """Return the same for a file in which several lines of one step may have different figures."""
    same_step = takewhile(lambda before: before["step"] == line["step"], reversed(kept))
    return kept[-1]["step"] > line["step"] or any((before.keys() & line.keys()) - {"step"} for before in same_step)


def _part(line: Line) -> Part | None:
    run = line.get("run")
    return None if run is None else Part(run["id"], run["started"], run["since"])


def _valid(lines: Iterable[Line], parts: Iterable[Part], run: str | None) -> list[Line]:
    """Return the lines of `run` whose steps no later one of its `parts` has repeated."""
    lines = list(lines)
    last = {part: _last_step(part, parts, run) for part in set(map(_part, lines))}
    return [line for line in lines if line["step"] <= last[_part(line)]]


def _last_step(part: Part | None, parts: Iterable[Part], run: str | None) -> float:
    """Return the last step for which lines of `part` are valid, or -1 if it is not a part of `run`."""
    if part is None or part.id != run:
        return float("inf") if part is None and run is None else -1.0
    return min((other.since for other in parts if other.started > part.started), default=float("inf"))


def _parts_of(run: str | None, lines: Iterable[Line]) -> set[Part]:
    """Return the parts of `run` that occur in `lines`."""
    return {part for part in map(_part, lines) if part is not None and part.id == run}


def _last_run(lines: Sequence[Line]) -> str | None:
    part = _part(lines[-1]) if lines else None
    return None if part is None else part.id


def _configured(ds_config: Line | None) -> list[Path]:
    section = (ds_config or {}).get(SECTION)
    monitor = section.get("monitor") if isinstance(section, Mapping) else None
    path = monitor.get("path") if isinstance(monitor, Mapping) else None
    return [Path(path)] if path and isinstance(path, str) else []


def _monitor(places: Sequence[Path]) -> Path:
    """Return the directory of the statistics. They may have been moved together with the run."""
    return next((place for place in places if is_file(place / STATISTICS)), places[0])


def _trainer(directory: Path, last_step: float) -> Line | None:
    """Return Trainer's newest state up to step `last_step`. Older, longer runs may have left checkpoints too."""
    files = [directory / TRAINER, *directory.glob(f"checkpoint-*/{TRAINER}")]
    states = [state for file in files if (state := read_object(file, TRAINER_FIELDS))]
    ours = [state for state in states if (state.get("global_step") or 0) <= last_step]
    return max(ours, key=lambda state: state.get("global_step") or 0, default=None)


def _last_possible_step(measured: Sequence[Line]) -> float:
    """Return the last step that the run can have made, or infinity if no line states which run it belongs to."""
    first = _part(measured[0]) if measured else None
    if first is None:
        return float("inf")
    steps = chain([first.since], (line["step"] for line in measured))
    return float(measured[-1]["step"] + max(after - before for before, after in pairwise(steps)) - 1)


def _first_object(*files: Path) -> dict[str, Any] | None:
    """Return the first object with any keys in JSON `files`, or None if there is none."""
    return next((value for file in files if (value := read_object(file))), None)


def read_summary(directory: Path) -> dict[str, Any]:
    """Return the content of summary.json of a run.

    Raises:
        DataError: The run is not finished, or `directory` does not hold a run.
    """
    summary = read_object(directory / SUMMARY, SUMMARY_FIELDS)
    if summary is None:
        raise DataError(f"{directory}: contains no {SUMMARY}; pass the --output-dir of a finished run")
    return summary
