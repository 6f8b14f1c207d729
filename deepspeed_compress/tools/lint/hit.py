"""What a rule finds in a document, and how it would correct it."""

from dataclasses import dataclass
from typing import Literal

Path = tuple[str | int, ...]
"""Keys and indices from the outermost object to a value."""


@dataclass(frozen=True, slots=True)
class Span:
    """Characters `start` up to `end` (not included) of a text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Edit:
    """Puts `text` in the place of `span`."""

    span: Span
    text: str


@dataclass(frozen=True, slots=True)
class Fix:
    """Edits that correct a hit. `safe`: what DeepSpeed does afterwards is what the user had asked for."""

    title: str
    edits: tuple[Edit, ...]
    safe: bool = True


@dataclass(frozen=True, slots=True)
class Hit:
    """One thing that is wrong, at a place of the document.

    `what` has the value and what is allowed, without a full stop. `write` goes on after the word "Write", again
    without a full stop, as in `config.problems.Problem`: `"stage": 3`, or `nothing: remove the key`.
    `path` may lead to a key that is missing: the nearest object around it is shown then. `on` chooses between a key
    and its value. `span` is for places that no path leads to, such as a syntax error or the first of two equal keys.
    """

    path: Path
    what: str
    write: str
    on: Literal["key", "value"] = "value"
    fix: Fix | None = None
    span: Span | None = None
