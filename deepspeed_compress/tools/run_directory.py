"""Reading of the files that a run leaves in its directories, shared by all commands that read runs.

Several runs may have written into a directory, and so may several processes of one resumed run. The last run is used,
or the one that summary.json names. If a process continued from a checkpoint, earlier lines about steps after that
checkpoint are dropped. Lines name their part of a run in "run" (`monitor.journal.Part`). Lines of other programs do
not, so only their order is known. Contents may have been edited, cut off or damaged.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepspeed_compress.config import SECTION
from deepspeed_compress.config.problems import value_at
from deepspeed_compress.errors import DataError
from deepspeed_compress.monitor import STATISTICS, VERSIONS
from deepspeed_compress.monitor.journal import CONFIGURATION, EVENTS, Part
from deepspeed_compress.safe_files import LARGEST_TEXT, open_regular
from deepspeed_compress.tools.outputs.report import printable

LARGEST = 1e100
"""Largest magnitude of a number. Sums of squares of larger ones would overflow."""
_SHOWN = 60

Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Count = Annotated[int, Field(gt=-(2**53), lt=2**53)]
Step = Annotated[int, Field(ge=0, lt=2**53)]


class _Record(BaseModel):
    """Fields that are read of an object in a file of a run, without conversion. Others may be anything."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Part(_Record):
    id: str
    started: str
    since: Count


class _Line(_Record):
    """Line of a .jsonl file."""

    step: Step
    run: _Part | None = None


class Figures(_Line):
    """Line of metrics.jsonl or rollout.jsonl: all other fields are numbers."""

    __pydantic_extra__: dict[str, Number | None]


class Statistic(Figures):
    """Line of compression.jsonl."""

    method: str | None = None
    settings: str | None = None


class EventLine(_Line):
    """Line of events.jsonl."""

    kind: str
    reason: str | None = None
    before: str | None = None
    after: str | None = None
    evidence: dict[str, Number | None] | None = None
    island: Count | None = None
    dry_run: bool | None = None


class Summary(_Record):
    """Content of summary.json."""

    monitor_path: str | None = None
    run: str | None = None
    tokens_per_s: Number | None = None
    parameters: Count | None = None
    world_size: Count | None = None
    eval_loss: Number | None = None


class TrainerState(_Record):
    """Content of trainer_state.json."""

    global_step: Count | None = None
    max_steps: Count | None = None
    log_history: list[dict[str, Any]] | None = None


def _is_number(value: Any) -> bool:
    """Return True for None and for finite numbers of reasonable magnitude."""
    return value is None or (type(value) in (int, float) and abs(value) <= LARGEST)


def _check(kind: type[_Record], value: object, place: str, instead: str) -> dict[str, Any]:
    """Return `value`, an object of `kind` in a file.

    Raises:
        DataError: It is not one. The message begins with `place`.
    """
    if not isinstance(value, dict):
        raise DataError(f"{place}: {type(value).__name__} (allowed: an object); {instead}")
    try:
        kind.model_validate(value)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False)
        path = ".".join(map(str, first["loc"]))
        text = f"{path!r} is {repr(first['input'])[:_SHOWN]}: {first['msg']}"
        raise DataError(f"{place}: {printable(text)}; {instead}") from None
    return value


def read_lines(file: Path, kind: type[_Line] = _Line) -> list[dict[str, Any]]:
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
        checked = _check(kind, line, f"{file}:{number}", "correct the line, or remove it")
        # Thousands of lines have the same keys.
        lines.append({sys.intern(key): value for key, value in checked.items()})
    return lines


def read_object(file: Path, kind: type[_Record] = _Record) -> dict[str, Any] | None:
    """Return the object of `kind` in a JSON file, or None if there is no file.

    Raises:
        DataError: The file is too large, is not a JSON object, or has an invalid field.
    """
    if not is_file(file):
        return None
    try:
        value = _parse(read_content(file))
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({printable(str(error))}); restore the file, or remove it") from None
    return _check(kind, value, str(file), "restore the file, or remove it")


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
        raise DataError(f"{file}: has more than {LARGEST_TEXT:,} bytes; write a larger monitor.every")
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
            {key: value for key, value in entry.items() if _is_number(value)}
            for entry in entries
            if type(entry.get("step")) is int and 0 <= entry["step"] < 2**53
        ]


def read_directory(directory: Path, config: Line | None = None) -> RunDirectory:
    """Read the files of a run. `config` replaces the configuration that the run left.

    Raises:
        DataError: A file is damaged. The message names the file and the line.
    """
    summary = read_object(directory / SUMMARY, Summary)
    named = Path((summary or {}).get("monitor_path") or directory)
    ds_config = config if config is not None else _first_object(directory / CONFIGURATION, named / CONFIGURATION)
    monitor = _find_statistics(directory, named, value_at(ds_config, (SECTION, "monitor", "path")))
    statistics, events = read_lines(monitor / STATISTICS, Statistic), _all_events(monitor)
    versions = read_lines(monitor / VERSIONS, Figures)
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
        _trainer(directory),
        _first_object(*(directory / name for name in RESULTS)),
    )


def read_statistics(directory: Path, run: str | None = None) -> Lines:
    """Return all valid lines of compression.jsonl in `directory` that belong to `run`, or else to the last run."""
    lines = read_lines(directory / STATISTICS, Statistic)
    run = run or _last_run(lines)
    parts = _parts_of(run, [*lines, *_all_events(directory)])
    return drop_replaced(_valid(lines, parts, run))


def read_metrics(directory: Path) -> Lines:
    """Return the valid lines of metrics.jsonl in `directory`."""
    return drop_replaced(read_lines(directory / METRICS, Figures), _replaces_figure)


def _all_events(directory: Path) -> list[Line]:
    """Return the events of all islands, those of the first island first. Each other island has its own file."""
    files = [directory / EVENTS, *sorted(directory.glob(f"island_*/{EVENTS}"))]
    return [line for file in files for line in read_lines(file, EventLine)]


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


def _find_statistics(directory: Path, named: Path, configured: object) -> Path:
    """Return the directory of the statistics. They may have been moved together with the run."""
    places = [directory, named, *([Path(configured)] if configured and isinstance(configured, str) else [])]
    return next((place for place in places if is_file(place / STATISTICS)), directory)


def _trainer(directory: Path) -> Line | None:
    """Return Trainer's state that was written last, at the end of the run or with a checkpoint."""
    files = [file for file in (directory / TRAINER, *directory.glob(f"checkpoint-*/{TRAINER}")) if is_file(file)]
    return read_object(max(files, key=os.path.getmtime), TrainerState) if files else None


def _first_object(*files: Path) -> dict[str, Any] | None:
    """Return the first object with any keys in JSON `files`, or None if there is none."""
    return next((value for file in files if (value := read_object(file))), None)


def read_summary(directory: Path) -> dict[str, Any]:
    """Return the content of summary.json of a run.

    Raises:
        DataError: The run is not finished, or `directory` does not hold a run.
    """
    summary = read_object(directory / SUMMARY, Summary)
    if summary is None:
        raise DataError(f"{directory}: contains no {SUMMARY}; pass the --output-dir of a finished run")
    return summary
