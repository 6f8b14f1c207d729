"""A configuration as DeepSpeed reads it, with the place of every key and value."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.tools.lint.hit import Hit, Path, Span
from deepspeed_compress.tools.lint.nodes import Extension, Kind, Member, Node
from deepspeed_compress.tools.lint.scanner import scan

__all__ = ["Document", "Extension", "Hit", "Kind", "Member", "Node", "Path", "Span", "parse"]


@dataclass(frozen=True, slots=True)
class Document:
    """A configuration. `root` is None when nothing of it could be read; what follows an error is read all the same."""

    path: str
    text: str
    root: Node | None
    problems: tuple[Hit, ...] = ()
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

    def span_of(self, hit: Hit) -> Span:
        """Where to point for `hit`: its own span, its key or value, else the nearest object that exists."""
        if hit.span is not None:
            return hit.span
        for depth in range(len(hit.path), 0, -1):
            path = hit.path[:depth]
            member, node = self.member(*path), self.node(*path)
            if member is not None and (hit.on == "key" or depth < len(hit.path)):
                return member.key_span
            if node is not None:
                return node.span
        start = 0 if self.root is None else self.root.span.start
        return Span(start, min(start + 1, len(self.text)))

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of a character, both from 1."""
        return self.text.count("\n", 0, offset) + 1, offset - self.text.rfind("\n", 0, offset)


def parse(text: str, path: str = "") -> Document:
    """Read HJSON as DeepSpeed does, except that an error does not end it."""
    scanned = scan(text)
    return Document(path, text, scanned.root, scanned.problems, scanned.extensions)


def _child(node: Node, part: str | int) -> Node | None:
    if isinstance(part, int):
        return node.items[part] if 0 <= part < len(node.items) else None
    member = node.by_key.get(part)
    return None if member is None else member.value


def _walk(node: Node, path: Path) -> Iterator[tuple[Path, Member]]:
    for member in node.members:
        yield (*path, member.key), member
        yield from _walk(member.value, (*path, member.key))
    for index, item in enumerate(node.items):
        yield from _walk(item, (*path, index))
