"""The keys that DeepSpeed knows, by section: keys.json, which `launch/lint_keys.py` writes."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from deepspeed_compress.diagnostics import Path as KeyPath
from deepspeed_compress.tools.lint.document import Document, Member

_CLOSE = 0.72
_PLACES = 3
OUR_SECTION = "deepspeed_compress"


@dataclass(frozen=True, slots=True)
class Key:
    """Key of a section. Its type is unknown if there are no `kinds`. `deprecated` is the key to write instead."""

    kinds: Sequence[str] = ()
    choices: Sequence[object] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    """Limits by "above", "least", "below" and "most"."""
    alias: str = ""
    """Name that DeepSpeed documents."""
    deprecated: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Section of the configuration.

    In a `strict` section, DeepSpeed refuses unknown keys, checks types and drops "auto". In others it accepts
    everything.
    """

    path: tuple[str, ...]
    strict: bool
    keys: Mapping[str, Key]


@dataclass(frozen=True, slots=True)
class Keys:
    """Content of keys.json."""

    version: str
    sections: Mapping[tuple[str, ...], Section]
    removed: Mapping[tuple[str, ...], frozenset[str]]
    optimizers: Mapping[str, frozenset[str]]
    """Keys of `params` by type. A type followed by "+offload" or "+torch" is a variant of it."""
    untested_optimizers: frozenset[str]
    schedulers: Mapping[str, Mapping[str, bool]]
    """Keys of `params` by type, and whether each is required."""


@cache
def keys() -> Keys:
    """Return the table, which is read only once."""
    table = json.loads(Path(__file__).with_name("keys.json").read_text(encoding="utf-8"))
    sections = {
        path: Section(
            path, content["unknown"] == "refused", {name: Key(**key) for name, key in content["keys"].items()}
        )
        for path, content in _by_path(table["sections"])
    }
    return Keys(
        table["deepspeed"],
        sections,
        {path: frozenset(removed) for path, removed in _by_path(table["removed"])},
        {name: frozenset(parameters) for name, parameters in table["optimizers"].items()},
        frozenset(table["untested_optimizers"]),
        table["schedulers"],
    )


def _by_path(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, content in table.items():
        yield tuple(name.split("/")) if name else (), content


def known_values(document: Document, *, strict: bool) -> Iterator[tuple[KeyPath, Key, Member]]:
    """Yield every known key in the strict or in the other sections of `document`. If it is repeated, yield the last."""
    for section in keys().sections.values():
        holder = document.node(*section.path) if section.strict == strict else None
        for member in holder.by_key.values() if holder is not None else ():
            if member.key in section.keys:
                yield (*section.path, member.key), section.keys[member.key], member


def unknown_keys(document: Document, *, strict: bool) -> Iterator[tuple[KeyPath, Section]]:
    """Yield every unknown key in the strict or in the other sections of `document`.

    Keys of the other sections that serve as comments are left out.
    """
    for section in keys().sections.values():
        holder = document.node(*section.path) if section.strict == strict else None
        removed = keys().removed.get(section.path, frozenset())
        for name in dict.fromkeys(member.key for member in holder.members) if holder is not None else ():
            remark = not strict and (name[:1] in ("_", "$", "#", "/") or name in ("comment", "comments", ""))
            ours = not section.path and name == OUR_SECTION
            if name not in section.keys and name not in removed and not remark and not ours:
                yield (*section.path, name), section


def closest(name: str, names: Iterable[str], cutoff: float = _CLOSE) -> str | None:
    """Return the name among `names` that `name` is probably a misspelling of, or None."""
    lower = {known.lower().replace("-", "_"): known for known in sorted(names)}
    close = get_close_matches(name.lower().replace("-", "_"), lower, n=1, cutoff=cutoff)
    return lower[close[0]] if close else None


def places(path: KeyPath) -> list[tuple[str, ...]]:
    """Return other sections that know the last key of `path`. Keys that are common, such as "enabled", have none."""
    name = str(path[-1])
    found = [section.path for section in keys().sections.values() if name in section.keys]
    # "bfloat16" is the old name of a section.
    found = [place for place in found if place != path[:-1] and place != ("bfloat16",)]
    return found if len(found) <= _PLACES else []
