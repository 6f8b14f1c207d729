"""YAML configurations of Accelerate, which name a DeepSpeed configuration or hold its most used settings."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import yaml  # type: ignore[import-untyped]

from deepspeed_compress.lint.document import Document
from deepspeed_compress.lint.embedded import embedded, named_file
from deepspeed_compress.lint.files import Source, decode_text
from deepspeed_compress.lint.hit import Hit, Span
from deepspeed_compress.lint.nodes import Kind, Member, Node, object_node

MAX_BYTES = 64 * 2**10
"""PyYAML is slow; configurations of Accelerate have about a kilobyte."""
MAX_DEPTH = 20
MAX_VALUES = 10_000

_HAS_SECTION = re.compile(rb"^deepspeed_config\s*:", re.MULTILINE)
_KINDS: dict[type, Kind] = {bool: "bool", int: "number", float: "number", type(None): "null"}


def accelerate_sources(path: str, content: bytes, read: Callable[[str], Iterable[Source]]) -> Iterator[Source]:
    """The DeepSpeed configuration in a YAML file, and the one that it names; none where it is not used."""
    if not _HAS_SECTION.search(content):
        return
    text = decode_text(content)
    if isinstance(text, Hit):
        yield Source(Document(path, "", None, (text,), fixable=False))
    elif len(content) > MAX_BYTES:
        yield _problem(path, text, Span(0, 0), f"larger than {MAX_BYTES >> 10} KiB", "a configuration of Accelerate")
    else:
        try:
            root = _convert(yaml.compose(text, Loader=yaml.SafeLoader), _Budget())
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            yield _problem(path, text, *_yaml_error(error, len(text)))
        else:
            document = Document(path, text, root, fixable=False)
            if document.get("distributed_type", default="DEEPSPEED") == "DEEPSPEED":
                yield from _sources(document, read)


def _sources(document: Document, read: Callable[[str], Iterable[Source]]) -> Iterator[Source]:
    ranks = document.get("num_processes")
    hints: dict[str, Any] = {"framework": "accelerate"}
    if isinstance(ranks, int) and ranks > 0:
        hints["world_size"] = ranks
    yield Source(embedded(document), hints)
    file = named_file(document)
    for source in () if file is None else read(file):
        yield Source(source.document, hints)


class _Budget:
    """How many values may still come: aliases can make billions of a few lines."""

    def __init__(self) -> None:
        self.left = MAX_VALUES


def _convert(node: Any, budget: _Budget, depth: int = 0) -> Node:
    budget.left -= 1
    if budget.left < 0 or depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_VALUES} values, or nested more than {MAX_DEPTH} deep")
    span = Span(node.start_mark.index, node.end_mark.index) if node is not None else Span(0, 0)
    if isinstance(node, yaml.MappingNode):
        members = [
            Member(str(key.value), Span(key.start_mark.index, key.end_mark.index), _convert(value, budget, depth + 1))
            for key, value in node.value
        ]
        return object_node(members, span)
    if isinstance(node, yaml.SequenceNode):
        items = tuple(_convert(item, budget, depth + 1) for item in node.value)
        return Node("array", [item.value for item in items], span, items=items)
    value = None if node is None else yaml.SafeLoader("").construct_object(node)
    kind = _KINDS.get(type(value), "string")
    return Node(kind, value if kind != "string" else str(value), span)


def _yaml_error(error: Exception, length: int) -> tuple[Span, str, str]:
    mark = getattr(error, "problem_mark", None)
    at = min(mark.index if mark is not None else getattr(error, "position", 0), length)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    return Span(at, min(at + 1, length)), f"not YAML: {what}", "YAML, as `accelerate config` does"


def _problem(path: str, text: str, span: Span, what: str, write: str) -> Source:
    return Source(Document(path, text, None, (Hit((), what, write, span=span),), fixable=False))
