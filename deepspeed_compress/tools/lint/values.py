"""Values of a configuration as DeepSpeed's models read them, and as messages show them."""

from collections.abc import Iterator

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.strings import to_json

AUTO = "auto"
TRUE_WORDS = frozenset({"true", "t", "yes", "y", "on", "1"})
FALSE_WORDS = frozenset({"false", "f", "no", "n", "off", "0"})
"""Strings that pydantic reads as booleans."""

_WIDTH = 60


def show(value: object) -> str:
    """Return a value as JSON, shortened to fit into a sentence."""
    text = to_json(value)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def listed(values: object) -> str:
    """Return values as JSON, separated by commas."""
    return ", ".join(show(value) for value in values) if isinstance(values, list | tuple | frozenset) else show(values)


def name(path: Path) -> str:
    """Return a path in the form of DeepSpeed's messages, such as zero_optimization.stage."""
    return ".".join(str(part) for part in path)


def number(value: object) -> float | None:
    """Return a finite number, or None for anything else, including booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if float("-inf") < value < float("inf") else None


def integer(value: object) -> int | None:
    """Return an integer as DeepSpeed's models read it (2, 2.0 or "2"), or None."""
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.isdigit():
        return int(value)
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def text_number(value: object) -> float | None:
    """Return the finite number that a string stands for, or None."""
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        return number(integer(value) if integer(value) is not None else float(value))
    except ValueError:
        return None


def truth(value: object) -> bool | None:
    """Return a boolean as DeepSpeed's models read it, or None if the value is not one."""
    if isinstance(value, str):
        word = value.lower()
        return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None
    return bool(value) if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)) else None


def means_auto(value: object) -> bool:
    """Return True if a value is "auto" or another spelling of it."""
    return isinstance(value, str) and value.strip().lower() == AUTO


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Yield every value that is not an object, with its path. An array is a single value."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    else:
        yield path, value
