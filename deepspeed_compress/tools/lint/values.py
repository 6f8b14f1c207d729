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
_CHUNK = re.compile(r"[^\"'\\\x00-\x1f]*")
_FIRST_LINE = re.compile(r"[ \t\r]*(\n?)")
_LINE = re.compile(r"[^\n\r]*")
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
HALF_PAIR = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair, which UTF-8 text cannot contain."""
_HEX = re.compile(r"[0-9a-fA-F]{4}")


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
    return _escaped(text, start)


def _escaped(text: str, start: int) -> tuple[str, int, bool]:
    quote, parts, is_json = text[start], list[str](), True
    chunk = match(_CHUNK, text, start + 1)
    while (char := text[chunk.end() : chunk.end() + 1]) != quote:
        part, at, known = _special(text, start, chunk.end(), char)
        parts += (chunk[0], part)
        is_json = is_json and known
        chunk = match(_CHUNK, text, at)
    return "".join((*parts, chunk[0])), chunk.end() + 1, is_json


def _special(text: str, start: int, at: int, char: str) -> tuple[str, int, bool]:
    """Return the text for the character at `at` in the string at `start`, its end, and whether it is valid JSON."""
    if char == "\\":
        return _escape(text, at)
    if char in ("", "\n", "\r"):
        raise _error(text, Span(start, at), "this string has no end on its line", f"a closing {text[start]}")
    if char < " ":
        raise _error(text, Span(at, at + 1), f"{char!r} cannot stand in a string", to_json(char)[1:-1])
    return char, at + 1, True


def _escape(text: str, at: int) -> tuple[str, int, bool]:
    """Return the text for the backslash at `at`, the end of the escape, and whether it is valid JSON."""
    char = text[at + 1 : at + 2]
    if char in _ESCAPES:
        return _ESCAPES[char], at + 2, char != "'"
    code = _unicode(text, at) if char == "u" else None
    if code is None:
        what = f'{text[at : at + 2]} is not an escape (allowed: \\" \\\\ \\/ \\b \\f \\n \\r \\t \\uXXXX)'
        raise _error(text, Span(at, at + 2), what, "\\\\ for a backslash")
    digits, low = text[at + 2 : at + 6], _unicode(text, at + 6) if text[at + 6 : at + 8] == "\\u" else None
    if 0xD800 <= code < 0xDC00 and low is not None and 0xDC00 <= low < 0xE000:
        pair = 0x10000 + ((code - 0xD800) << 10 | low - 0xDC00)
        return chr(pair), at + 12, bool(_HEX.fullmatch(digits) and _HEX.fullmatch(text[at + 8 : at + 12]))
    return chr(code), at + 6, bool(_HEX.fullmatch(digits))


def _unicode(text: str, at: int) -> int | None:
    """Return the code after the backslash and u at `at`, or None. Like hjson, this uses int()."""
    digits = text[at + 2 : at + 6]
    if len(digits) < 4 or digits[1] in "xX":
        return None
    try:
        code = int(digits, 16)
    except ValueError:
        return None
    return code if code >= 0 else None


def _error(text: str, span: Span, message: str, instead: str) -> ScanError:
    """Return an error in a string. Reading resumes at the end of its line, because the end of the string is unknown."""
    return ScanError(span, message, instead, match(_LINE, text, span.start).end())


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
