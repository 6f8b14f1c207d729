"""Checks of the contents of a run's files, which may have been edited or damaged."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from deepspeed_compress.tools.line_files import Check

Field = tuple[str, Callable[[Any], bool]]
"""Description of what is allowed, and the predicate that checks it."""
LARGEST = 1e100
"""Largest magnitude of a number. Sums of squares of larger ones would overflow."""
_SHOWN = 40


def is_number(value: Any) -> bool:
    """Return True for None and for finite numbers of reasonable magnitude."""
    return value is None or (type(value) in (int, float) and abs(value) <= LARGEST)


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
TRAINER_STATE: Mapping[str, Field] = {
    "global_step": _COUNT,
    "max_steps": _COUNT,
    "log_history": _optional("a list of objects", _are_objects),
}


def find_problem(fields: Mapping[str, Field], found: Mapping[str, Any], others: Field = _ANYTHING) -> str:
    """Return what is wrong with the first field of `found` that does not satisfy `fields`, or "".

    `others` is the check of fields that `fields` does not name. A missing field of `fields` counts as None.
    """
    for name in [*fields, *(key for key in found if key not in fields)]:
        allowed, fits = fields.get(name, others)
        if not fits(found.get(name)):
            return f"{name!r} is {repr(found.get(name))[:_SHOWN]} (allowed: {allowed})"
    return ""


STATISTIC: Check = partial(find_problem, STATISTIC_FIELDS, others=_NUMBER)
"""Check of a line of compression.jsonl: figures must be numbers."""
METRIC: Check = partial(find_problem, MappingProxyType({"run": _ANYTHING}), others=_NUMBER)
"""Check of a line of metrics.jsonl: figures must be numbers."""
EVENT: Check = partial(find_problem, EVENT_FIELDS)
"""Check of a line of events.jsonl."""
