"""Reading of the files that a run leaves, whose contents may have been edited, cut off or damaged."""

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed_compress.errors import DataError
from deepspeed_compress.safe_files import LARGEST_TEXT, open_regular
from deepspeed_compress.tools.outputs.terminal import printable

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


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_number, value.values()))


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


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
    "evidence": _optional("an object of numbers", _are_numbers),
    "island": _COUNT,
    "dry_run": _FLAG,
}
SUMMARY_FIELDS: Mapping[str, Field] = {
    "sample": _TEXT,
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
    "log_history": _optional("a list of objects", _are_objects),
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
        DataError: The file is too large, or a line is not a JSON object with a `step`, or `check` finds something wrong
            with it. The message names the file and the line.
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
