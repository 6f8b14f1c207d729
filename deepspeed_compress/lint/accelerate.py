"""YAML configurations of Accelerate, which name a DeepSpeed configuration or hold its most used settings.

The settings become the configuration that Accelerate would make of them, at the places where the YAML has them.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from deepspeed_compress.lint.document import Document
from deepspeed_compress.lint.files import Source
from deepspeed_compress.lint.hit import Hit, Path, Span
from deepspeed_compress.lint.nodes import Kind, Member, Node, object_node

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


def accelerate_sources(document: Document, read: Callable[[str], Iterable[Source]]) -> Iterator[Source]:
    """The DeepSpeed configuration in one of Accelerate, or the one that it names; none where it is not used."""
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


def _problem(path: str, text: str, span: Span, what: str, write: str) -> Source:
    return Source(Document(path, text, None, (Hit((), what, write, span=span),), fixable=False))
