"""YAML configurations of Accelerate, which name a DeepSpeed configuration or hold its most used settings.

The settings become the configuration that Accelerate would make of them, at the places where the YAML has them.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import yaml  # type: ignore[import-untyped]

from deepspeed_compress.lint.document import Document
from deepspeed_compress.lint.files import Source, decode_text
from deepspeed_compress.lint.hit import Hit, Path, Span
from deepspeed_compress.lint.nodes import Kind, Member, Node, object_node

MAX_BYTES = 64 * 2**10
"""PyYAML is slow; configurations of Accelerate have about a kilobyte."""
MAX_DEPTH = 20
MAX_VALUES = 10_000

_HAS_SECTION = re.compile(rb"^deepspeed_config\s*:", re.MULTILINE)
_KINDS: dict[type, Kind] = {bool: "bool", int: "number", float: "number", type(None): "null"}
_PLACES: dict[str, Path] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
}
_DEFAULTS: tuple[tuple[Path, Kind, object], ...] = (
    (("train_batch_size",), "string", "auto"),
    (("train_micro_batch_size_per_gpu",), "string", "auto"),
    (("zero_optimization", "stage"), "number", 2),
)
_PRECISIONS = ("bf16", "fp16")

Placed = tuple[Path, Span, Node]


def accelerate_sources(path: str, content: bytes, read: Callable[[str], Iterable[Source]]) -> Iterator[Source]:
    """The DeepSpeed configuration in a YAML file, or the one that it names; none where it is not used."""
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
    name = document.get("deepspeed_config", "deepspeed_config_file")
    if not isinstance(name, str) or name == "none":
        yield Source(_embedded(document), hints)
        return
    # Accelerate opens the name as it is, from where it is started; that is often where the YAML lies.
    beside = os.path.join(os.path.dirname(document.path), name)
    found = next((path for path in (name, beside) if os.path.isfile(path)), None)
    if found is None:
        node = document.node("deepspeed_config", "deepspeed_config_file")
        span = node.span if node else Span(0, 0)
        yield _problem(document.path, document.text, span, f"{name!r} is no file", "the path of a configuration")
        return
    for source in read(found):
        yield Source(source.document, hints)


def _embedded(document: Document) -> Document:
    """The configuration that Accelerate makes of its own keys."""
    section = document.member("deepspeed_config")
    assert section is not None
    placed: list[Placed] = []
    for member in section.value.members:
        place = _PLACES.get(member.key) or ((member.key,) if member.value.kind == "object" else None)
        if place is not None and not (place[-1] == "nvme_path" and member.value.value == "none"):
            placed.append((place, member.key_span, member.value))
    precision = document.member("mixed_precision")
    if precision is not None and precision.value.value in _PRECISIONS:
        enabled = Node("bool", True, precision.value.span)
        placed.append(((precision.value.value, "enabled"), precision.key_span, enabled))
    given = {path for path, _, _ in placed}
    placed += [
        (path, section.key_span, Node(kind, value, section.key_span))
        for path, kind, value in _DEFAULTS
        if path not in given and path[:1] not in given
    ]
    return Document(document.path, document.text, _tree(placed, section.value.span), fixable=False)


def _tree(placed: list[Placed], span: Span) -> Node:
    """One object of values and their paths."""
    members: list[Member] = []
    for key in dict.fromkeys(path[0] for path, _, _ in placed):
        below = [(path[1:], key_span, node) for path, key_span, node in placed if path[0] == key]
        path, key_span, node = below[0]
        members.append(Member(str(key), key_span, _tree([b for b in below if b[0]], key_span) if path else node))
    return object_node(members, span)


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
