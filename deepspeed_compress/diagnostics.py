"""Diagnostics of a configuration or a run, shared by the section's validation, the linter and the doctor.

This module imports only the standard library, because the linter starts with it.
"""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""Severities, the most severe first."""

Path = tuple[str | int, ...]
"""Keys and indices from the outermost object of a configuration to a value."""


def pointer(path: Iterable[str | int]) -> str:
    """Return the JSON pointer (RFC 6901) of a path of keys and indices."""
    return encodable("".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path))


def encodable(text: str) -> str:
    """Return `text` with lone surrogates, which no encoding can write, as JSON spells them: `\\ud800`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` to `end` (exclusive) of a text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Edit:
    """Replacement of `span` by `text`."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits of a text that carry out a remedy: DeepSpeed then does what the user had asked for."""

    title: str
    edits: tuple[Edit, ...]


class LineIndex:
    """Lines and columns of a text. Line breaks are searched for once, so that many positions can be looked up."""

    def __init__(self, text: str) -> None:
        self._starts = [0, *(found.end() for found in re.finditer("\n", text))]

    def position(self, offset: int) -> tuple[int, int]:
        """Return the line and column of a character, both 1-based."""
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a problem: in a configuration, or in steps of a run."""

    path: Path = ()
    """Path, possibly of a missing key: the nearest object around it is shown then."""
    on: Literal["key", "value"] = "value"
    """Part at `path` that is meant: its key or its value."""
    span: Span | None = None
    """Characters of `text`. A check sets them if no path exists, as for a syntax error; otherwise the linter does."""
    steps: tuple[int, int] | None = None
    """First and last optimizer step of the evidence."""
    file: str = ""
    text: str = field(default="", repr=False)
    """Content of the file."""
    lines: LineIndex | None = field(default=None, repr=False, compare=False)
    """Index of the lines of `text`, shared by all places in it. Without one, each lookup reads the whole text."""

    @property
    def region(self) -> Span:
        """Return the characters of `span`, or else the beginning of the text."""
        return self.span or Span(0, 0)

    @property
    def start(self) -> tuple[int, int]:
        """Return the line and column of the first character, 1-based."""
        return self._position(self.region.start)

    @property
    def end(self) -> tuple[int, int]:
        """Return the line and column after the last character, 1-based."""
        return self._position(self.region.end)

    def _position(self, offset: int) -> tuple[int, int]:
        return (self.lines or LineIndex(self.text)).position(offset)


def at(*path: str | int, span: Span | None = None) -> Place:
    """Return the place of the value at `path`, or of the characters of `span`."""
    return Place(path, span=span)


def at_key(*path: str | int, span: Span | None = None) -> Place:
    """Return the place of the key at the end of `path`."""
    return Place(path, "key", span)


def at_steps(first: int, last: int) -> Place:
    """Return the place of the optimizer steps `first` to `last` of a run."""
    return Place(steps=(first, last))


def write(instead: str) -> str:
    """Return the usual remedy, such as `Write "stage": 3.` or `Write nothing: remove the key.` as text."""
    return f"Write {instead}."


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One problem.

    A check sets the first fields; the code that runs the rules adds the code, name and severity of the rule.

    Example: `Diagnostic(at("zero_optimization", "stage"), "4 is no stage (allowed: 0 to 3)", write("0, 1, 2 or 3"))`.
    """

    place: Place
    message: str
    """Problem, with the value and what is allowed, without a period at its end."""
    remedy: str
    """Fix in words: one or several sentences."""
    fix: Fix | None = None
    """Edits of the file that carry out the remedy."""
    patch: Mapping[str, Any] | None = None
    """JSON merge patch (RFC 7396) of the configuration that carries out the remedy."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Figures that show the problem, by name."""
    severity: Severity = "error"
    weight: float = 1.0
    """Share of a step, of the bytes or of the memory that is affected, up to 1.

    Heavier problems come first among equals.
    """
    code: str = ""
    name: str = ""

    @property
    def pointer(self) -> str:
        """Return the JSON pointer of the place; empty for syntax errors and for keys missing at the top level."""
        return pointer(self.place.path)

    def __str__(self) -> str:
        return f"{self.pointer or '/'}: {self.message}. {self.remedy}"
