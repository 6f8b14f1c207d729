"""Values of a configuration as DeepSpeed's models read them and as messages show them, and strings of HJSON."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress

from deepspeed_compress.diagnostics import Path, Span

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


_JSON = json.JSONDecoder()
_FIRST_LINE = re.compile(r"[ \t\r]*(\n?)")
_LINE = re.compile(r"[^\n\r]*")
_QUOTED = {quote: re.compile(rf"{quote}(?:[^{quote}\\\n\r]|\\u(?s:.{{4}})|\\[^\n\r])*+{quote}") for quote in "\"'"}
"""String up to its closing quote, by its quote. After \\u, hjson reads four characters, whatever they are."""
_SOUND = re.compile(r"(?:[^\\\x00-\x1f]|\\[\"'\\/bfnrt]|\\u[0-9a-fA-F]{4})*+")
"""Beginning of a string up to what HJSON does not allow."""
HALF_PAIR = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which UTF-8 text cannot contain."""


class ScanError(Exception):
    """Syntax error: its place, what is wrong, what to write instead, and the position at which reading can resume."""

    def __init__(self, span: Span, message: str, instead: str, resume: int) -> None:
        super().__init__(message)
        self.span, self.message, self.instead, self.resume = span, message, instead, resume


def to_json(value: object) -> str:
    """Return `value` as JSON. Half surrogate pairs, which a file cannot contain, remain escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if HALF_PAIR.search(text) else text


def match(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    """Return the match at `at` of a pattern that always matches, if only an empty string."""
    found = pattern.match(text, at)
    assert found is not None
    return found


def quoted(text: str, start: int) -> tuple[str, int, bool]:
    """Return the string that starts with the quote at `start`, its end, and whether it is valid JSON too."""
    if text[start] == '"':
        # Python's own reader is much faster. Text that it refuses may still be HJSON, or needs an explanation.
        with suppress(ValueError):
            return *_JSON.raw_decode(text, start), True
    return *_as_hjson_reads(text, start), False


def _as_hjson_reads(text: str, start: int) -> tuple[str, int]:
    """Return the string at `start` and its end, from hjson's own reader."""
    from hjson.decoder import scanstring  # type: ignore[import-untyped]

    source = _QUOTED[text[start]].match(text, start) or match(_LINE, text, start)
    try:
        value, length = scanstring(source[0], 1)
    except ValueError:
        raise _error(text, start) from None
    return value, start + length


def _error(text: str, start: int) -> ScanError:
    """Return the error in the string at `start`.

    Reading resumes at the end of its line, because the end of the string is unknown.
    """
    at = match(_SOUND, text, start + 1).end()
    char, span = text[at : at + 1], Span(at, at + 1)
    if char == "\\":
        span = Span(at, at + 2)
        what = f'{text[at : at + 2]} is not an escape (allowed: \\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX)'
        instead = "\\\\ for a backslash"
    elif char in ("", "\n", "\r"):
        span, what, instead = Span(start, at), "this string has no end on its line", f"a closing {text[start]}"
    else:
        what, instead = f"{char!r} cannot stand in a string", to_json(char)[1:-1]
    return ScanError(span, what, instead, match(_LINE, text, start).end())


def multi_line(text: str, start: int, indentation: int | None) -> tuple[str, int]:
    """Return the string in triple quotes at `start`, and its end.

    The `indentation` of the opening quotes is removed from each line. It is None for quotes on the only line, on which
    hjson fails.
    """
    body = match(_FIRST_LINE, text, start + 3)
    end = text.find("'''", start + 3)
    if end < 0 or indentation is None:
        what = "this string in triple quotes has no end" if end < 0 else "triple quotes on the only line"
        raise ScanError(Span(start, start + 3), what, "it in double quotes", len(text) if end < 0 else end + 3)
    indent = re.compile(f"[ \\t\\r]{{0,{indentation}}}")
    lines = text[body.end() : end].split("\n")
    rest = [indent.sub("", line, count=1) for line in lines[1:]]
    first = indent.sub("", lines[0], count=1) if body[1] else lines[0]
    return "\n".join([first, *rest]).replace("\r", "").removesuffix("\n"), end + 3
