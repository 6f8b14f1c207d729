"""A configuration as DeepSpeed reads it, with the place of every key and value in its text."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from deepspeed_compress.diagnostics import Diagnostic, Fix, LineIndex, Path, Place, Span

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


@dataclass(frozen=True, slots=True)
class Document:
    """A configuration. `root` is None when nothing of it could be read; what follows an error is read all the same."""

    path: str
    text: str
    root: Node | None
    problems: tuple[Diagnostic, ...] = ()
    """Syntax errors."""
    extensions: tuple[Extension, ...] = ()
    """Where it is HJSON and not JSON, in the order of the text."""
    fixable: bool = True
    """Whether edits of `text` make sense: not when it stands for something else, such as base64."""
    origin: Node | None = None
    """The configuration of Accelerate that `root` was made of, as it is written."""

    @property
    def data(self) -> dict[str, Any]:
        """The configuration as DeepSpeed has it; empty unless the outermost value is an object."""
        return self.root.value if self.root is not None and self.root.kind == "object" else {}

    @property
    def readable(self) -> bool:
        """Whether there is an object to speak of: not when an error left nothing of it."""
        return self.root is not None and self.root.kind == "object" and bool(self.root.members or not self.problems)

    def get(self, *path: str | int, default: Any = None) -> Any:
        """The plain value at `path`, or `default` where a key of it is missing."""
        value: Any = self.data
        for part in path:
            known = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
            if part not in known:
                return default
            value = value[part]
        return value

    def has(self, *path: str | int) -> bool:
        """Whether `path` leads to a value, null included."""
        return self.node(*path) is not None

    def node(self, *path: str | int) -> Node | None:
        """The value at `path`; of equal keys the last."""
        node = self.root
        for part in path:
            if node is None:
                return None
            node = _child(node, part)
        return node

    def member(self, *path: str | int) -> Member | None:
        """The key at `path` of objects, with its value; of equal keys the last."""
        *above, key = path or (0,)
        holder = self.node(*above)
        return holder.by_key.get(key) if holder is not None and isinstance(key, str) else None

    def walk(self) -> Iterator[tuple[Path, Member]]:
        """Every key of every object, duplicates too, with its path, in the order of the text."""
        if self.root is not None:
            yield from _walk(self.root, ())

    @property
    def duplicates(self) -> int:
        """Number of keys that stand in an object a second time."""
        return 0 if self.root is None else _duplicates(self.root)

    def locate(self, place: Place, lines: LineIndex | None = None) -> Place:
        """Return `place` with its characters in this text. `lines` is the index of the text, if there is one."""
        return replace(place, span=self.span_of(place), file=self.path, text=self.text, lines=lines)

    def span_of(self, place: Place) -> Span:
        """The characters that `place` has, those of its key or value, else of the nearest object that exists."""
        if place.span is not None:
            return place.span
        for depth in range(len(place.path), 0, -1):
            path = place.path[:depth]
            member, node = self.member(*path), self.node(*path)
            if member is not None and (place.on == "key" or depth < len(place.path)):
                return member.key_span
            if node is not None:
                return node.span
        start = 0 if self.root is None else self.root.span.start
        return Span(start, min(start + 1, len(self.text)))


def _child(node: Node, part: str | int) -> Node | None:
    if isinstance(part, int):
        return node.items[part] if 0 <= part < len(node.items) else None
    member = node.by_key.get(part)
    return None if member is None else member.value


def _duplicates(node: Node) -> int:
    inside = (*(member.value for member in node.members), *node.items)
    return len(node.members) - len(node.by_key) + sum(map(_duplicates, inside))


def _walk(node: Node, path: Path) -> Iterator[tuple[Path, Member]]:
    for member in node.members:
        yield (*path, member.key), member
        yield from _walk(member.value, (*path, member.key))
    for index, item in enumerate(node.items):
        yield from _walk(item, (*path, index))
