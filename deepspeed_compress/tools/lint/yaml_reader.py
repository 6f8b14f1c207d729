"""Reader of YAML that produces the same nodes as the reader of HJSON."""

from typing import Any

import yaml

from deepspeed_compress.diagnostics import Span
from deepspeed_compress.tools.lint.document import Document, Kind, Member, Node, object_node, unread
from deepspeed_compress.tools.lint.values import ScanError

MAX_BYTES = 64 * 2**10
"""Maximum number of bytes. PyYAML is slow, and configurations have only a few kilobytes."""

_KINDS: dict[type, Kind] = {bool: "bool", int: "number", float: "number", type(None): "null"}


def parse_yaml(text: str, path: str = "") -> Document:
    """Read YAML, or report what is wrong with it. YAML is never corrected."""
    if len(text.encode()) > MAX_BYTES:
        return unread(path, text, Span(0, 0), f"larger than {MAX_BYTES >> 10} KiB", "a configuration")
    try:
        root = _convert(yaml.compose(text, Loader=yaml.SafeLoader), set())
    except ScanError as error:
        return unread(path, text, error.span, error.message, error.instead)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return unread(path, text, *_error(error, len(text)))
    return Document(path, text, root, fixable=False)


def _convert(node: Any, seen: set[int]) -> Node:
    """Return the node of the linter for one of PyYAML. `seen` has the ids of the mappings and lists read so far."""
    if node is None:
        return Node("null", None, Span(0, 0))
    span = Span(node.start_mark.index, node.end_mark.index)
    if isinstance(node, yaml.ScalarNode):
        value = _scalar(node)
        kind = _KINDS.get(type(value), "string")
        return Node(kind, value if kind != "string" else str(value), span)
    if id(node) in seen:
        # A few lines of such aliases can stand for billions of values.
        what = "an alias of a mapping or a list, which the linter does not follow"
        raise ScanError(span, what, "its content in this place", span.end)
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        return object_node([_member(key, value, seen) for key, value in node.value], span)
    items = tuple(_convert(item, seen) for item in node.value)
    return Node("array", [item.value for item in items], span, items=items)


def _scalar(node: Any) -> Any:
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        # PyYAML raises these for a value that does not fit its tag.
        raise ValueError(f"invalid literal for {node.tag}: {node.value[:40]!r}") from error


def _member(key: Any, value: Any, seen: set[int]) -> Member:
    if not isinstance(key, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(None, None, "a key that is no text", key.start_mark)
    return Member(key.value, Span(key.start_mark.index, key.end_mark.index), _convert(value, seen))


def _error(error: Exception, length: int) -> tuple[Span, str, str]:
    mark = getattr(error, "problem_mark", None)
    start = min(mark.index if mark is not None else getattr(error, "position", 0), length)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return Span(start, min(start + 1, length)), f"not YAML: {what}", "YAML"
