"""Values of a configuration and their places in its text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from deepspeed_compress.tools.lint.hit import Fix, Span

Kind = Literal["object", "array", "string", "number", "bool", "null"]


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place. `value` is plain Python; of keys that are there twice it has the last."""

    kind: Kind
    value: Any
    span: Span
    members: tuple["Member", ...] = ()
    """Of an object: every key, duplicates too."""
    items: tuple["Node", ...] = ()
    """Of an array."""
    by_key: Mapping[str, "Member"] = field(default_factory=dict, repr=False, compare=False)
    """Of an object: of equal keys the last."""


@dataclass(frozen=True, slots=True)
class Member:
    """A key of an object. `key_span` has the quotes."""

    key: str
    key_span: Span
    value: Node


def object_node(members: Sequence[Member], span: Span) -> Node:
    """The object that has `members`."""
    by_key = {member.key: member for member in members}
    value = {key: member.value.value for key, member in by_key.items()}
    return Node("object", value, span, tuple(members), by_key=by_key)


ExtensionKind = Literal[
    "byte-order-mark",
    "comment",
    "escape",
    "missing-braces",
    "missing-comma",
    "multi-line-string",
    "single-quotes",
    "trailing-comma",
    "unquoted-key",
    "unquoted-string",
]


@dataclass(frozen=True, slots=True)
class Extension:
    """Syntax that HJSON has and JSON has not: DeepSpeed reads HJSON, Hugging Face reads JSON.

    `fix`: the same in JSON; None where something would be lost.
    """

    kind: ExtensionKind
    span: Span
    fix: Fix | None = None
