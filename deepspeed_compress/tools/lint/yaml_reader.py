"""Reader of YAML that produces the same nodes as the reader of HJSON."""

from typing import Any

import yaml  # type: ignore[import-untyped]

from deepspeed_compress.diagnostics import Diagnostic, Span, at, write
from deepspeed_compress.tools.lint.document import Document, Kind, Member, Node, object_node

MAX_BYTES = 64 * 2**10
"""Maximum number of bytes. PyYAML is slow, and configurations have only a few kilobytes."""
MAX_DEPTH = 20
MAX_VALUES = 10_000

_MERGE = "tag:yaml.org,2002:merge"
_KINDS: dict[type, Kind] = {bool: "bool", int: "number", float: "number", type(None): "null"}


def parse_yaml(text: str, path: str = "") -> Document:
    """Read YAML, or report what is wrong with it. YAML is never corrected."""
    if len(text.encode()) > MAX_BYTES:
        return _unread(path, text, Span(0, 0), f"larger than {MAX_BYTES >> 10} KiB", "a configuration")
    try:
        root = _convert(yaml.compose(text, Loader=yaml.SafeLoader), _Budget())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return _unread(path, text, *_error(error, len(text)))
    return Document(path, text, root, fixable=False)


class _Budget:
    """Number of values that may still be read. Aliases can turn a few lines into billions of values."""

    def __init__(self) -> None:
        self.left = MAX_VALUES

    def take(self, depth: int) -> None:
        """Count a value that is nested `depth` deep."""
        self.left -= 1
        if self.left < 0 or depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_VALUES} values, or nested more than {MAX_DEPTH} deep")


def _pairs(node: Any, budget: _Budget, depth: int) -> list[tuple[Any, Any]]:
    """Return the keys and values of a mapping, including those that merge keys (`<<`) add to its own.

    The result is that of PyYAML's `flatten_mapping`, which can take exponential time and memory.
    """
    own = [(key, value) for key, value in node.value if key.tag != _MERGE]
    sources = [source for key, value in node.value if key.tag == _MERGE for source in _sources(value)]
    merged: dict[Any, tuple[Any, Any]] = {}
    for source in sources:
        budget.take(depth)
        for key, value in _pairs(source, budget, depth + 1):
            budget.take(depth)
            merged.setdefault(key.value, (key, value))
    known = {key.value for key, _ in own if isinstance(key, yaml.ScalarNode)}
    return [pair for name, pair in merged.items() if name not in known] + own


def _sources(value: Any) -> list[Any]:
    """Return the mappings that a merge key names, of which the first one takes precedence."""
    sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
    if not all(isinstance(source, yaml.MappingNode) for source in sources):
        raise yaml.constructor.ConstructorError(None, None, "a merge key without a mapping", value.start_mark)
    return sources


def _convert(node: Any, budget: _Budget, depth: int = 0) -> Node:
    budget.take(depth)
    span = Span(node.start_mark.index, node.end_mark.index) if node is not None else Span(0, 0)
    if isinstance(node, yaml.MappingNode):
        return object_node([_member(key, value, budget, depth) for key, value in _pairs(node, budget, depth)], span)
    if isinstance(node, yaml.SequenceNode):
        items = tuple(_convert(item, budget, depth + 1) for item in node.value)
        return Node("array", [item.value for item in items], span, items=items)
    value = None if node is None else _scalar(node)
    kind = _KINDS.get(type(value), "string")
    return Node(kind, value if kind != "string" else str(value), span)


def _scalar(node: Any) -> Any:
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # PyYAML raises these for a value that does not fit its tag.
        raise ValueError(f"invalid literal for {node.tag}: {node.value[:40]!r}") from error


def _member(key: Any, value: Any, budget: _Budget, depth: int) -> Member:
    if not isinstance(key, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(None, None, "a key that is no text", key.start_mark)
    return Member(key.value, Span(key.start_mark.index, key.end_mark.index), _convert(value, budget, depth + 1))


def _error(error: Exception, length: int) -> tuple[Span, str, str]:
    mark = getattr(error, "problem_mark", None)
    start = min(mark.index if mark is not None else getattr(error, "position", 0), length)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return Span(start, min(start + 1, length)), f"not YAML: {what}", "YAML"


def _unread(path: str, text: str, span: Span, message: str, instead: str) -> Document:
    return Document(path, text, None, (Diagnostic(at(span=span), message, write(instead)),), fixable=False)
