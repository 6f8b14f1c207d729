"""Diagnostics of the section, and the error that lists them all."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

from deepspeed_compress.config.models import SECTION, CompressConfig
from deepspeed_compress.diagnostics import Diagnostic, Path, at, encodable, write
from deepspeed_compress.errors import ConfigError


def show(value: object) -> str:
    """Return a value as JSON, shortened to fit one line of a message."""
    text = encodable(json.dumps(value, default=repr, ensure_ascii=False))
    return text if len(text) <= 80 else text[:77] + "..."


def listed(values: Iterable[object]) -> str:
    """Return values as JSON, separated by commas."""
    return ", ".join(show(value) for value in values)


def problem(path: Path, message: str, instead: str) -> Diagnostic:
    """Return a diagnostic of what is wrong at `path` of the section, and what to write instead."""
    return Diagnostic(at(SECTION, *path), message, write(instead))


def notice(path: Path, message: str, instead: str) -> Diagnostic:
    """Return a warning about a valid setting at `path` that has no effect or costs more than it gains."""
    return Diagnostic(at(SECTION, *path), message, write(instead), severity="warning")


Conflicts = Mapping[Path, tuple[object, str, str]]
"""Places of settings, each with the value that turns it off, a reason against others, and what to write instead."""


def find_conflicts_with(other: str, section: CompressConfig, conflicts: Conflicts) -> Iterator[Diagnostic]:
    """Yield a problem for each setting of `conflicts` that is not off, and so cannot be combined with `other`."""
    for path, (off, why, instead) in conflicts.items():
        value: object = section
        for key in path:
            value = getattr(value, str(key), None)
        if value not in (None, off):
            yield problem(path, f"cannot be combined with {other}: {why} (allowed: {show(off)})", instead)


def raise_problems(problems: Sequence[Diagnostic]) -> NoReturn:
    """Raise one ConfigError that lists every problem."""
    noun = "problem" if len(problems) == 1 else "problems"
    lines = "".join(f"\n  - {problem}" for problem in problems)
    raise ConfigError(f"{len(problems)} {noun} in the DeepSpeed configuration:{lines}")
