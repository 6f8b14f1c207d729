"""The DeepSpeed configuration that Accelerate derives from the settings in its own configuration.

Values keep their places in Accelerate's file. Settings that Accelerate does not pass on remain in `Document.origin`.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path as FilePath

from deepspeed_compress.diagnostics import Path, Span
from deepspeed_compress.tools.lint.document import Document, Kind, Member, Node, object_node
from deepspeed_compress.tools.lint.values import number, text_number

SECTION = "deepspeed_config"
NAME = "deepspeed_config_file"
PRECISIONS = ("bf16", "fp16")
PLACES: dict[str, Path] = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
}
"""Keys of `deepspeed_config` that Accelerate writes into the configuration, with their paths there."""
_DEFAULTS: tuple[tuple[Path, Kind, object], ...] = (
    (("train_batch_size",), "string", "auto"),
    (("train_micro_batch_size_per_gpu",), "string", "auto"),
    (("gradient_clipping",), "string", "auto"),
    (("zero_optimization", "stage"), "number", 2),
)

Placed = tuple[Path, Span, Node]


def embedded(document: Document) -> Document:
    """Return the DeepSpeed configuration in a configuration of Accelerate.

    `root` is None if Accelerate does not use DeepSpeed or names a file. Other documents are returned unchanged.
    """
    section = document.member(SECTION)
    if document.origin is not None or section is None:
        return document
    made = is_used(document) and file_name(document) is None
    root = _tree(list(_placed(document, section)), section.value.span) if made else None
    return replace(document, root=root, origin=document.root, fixable=False)


def is_used(document: Document) -> bool:
    """Return True if `accelerate launch` starts DeepSpeed, so that its section takes effect."""
    origin = document.origin or document.root
    kind = None if origin is None else origin.by_key.get("distributed_type")
    return kind is None or kind.value.value == "DEEPSPEED"


def settings(document: Document) -> tuple[Member, ...]:
    """Return the members of `deepspeed_config` in a configuration of Accelerate, as they are written."""
    origin = document.origin
    return origin.by_key[SECTION].value.members if origin is not None else ()


def file_name(document: Document) -> str | None:
    """Return the name of the DeepSpeed configuration in a configuration of Accelerate, or None."""
    origin = document.origin or document.root
    node = origin.by_key[SECTION].value.by_key.get(NAME) if origin is not None and SECTION in origin.by_key else None
    name = None if node is None else node.value.value
    return name if isinstance(name, str) and name != "none" else None


def named_file(document: Document) -> str | None:
    """Return the path of that DeepSpeed configuration, or None if it does not exist.

    Accelerate opens the name relative to its working directory, which is usually above the directory of its
    configuration.
    """
    name = file_name(document)
    if name is None:
        return None
    directory = FilePath(os.path.abspath(document.path)).parent
    beside = os.path.join(os.path.dirname(document.path), name)
    above = (str(parent / name) for parent in directory.parents)
    return next((path for path in (name, beside, *above) if os.path.isfile(path)), None)


def is_left_out(member: Member) -> bool:
    """Return True for gradient_clipping 0: Accelerate leaves the key out, and DeepSpeed clips by its default."""
    value = member.value.value
    return member.key == "gradient_clipping" and 0 in (number(value), text_number(value))


def _placed(document: Document, section: Member) -> Iterator[Placed]:
    """Yield every value that Accelerate writes, with its path in the configuration and its place in the text."""
    members = [member for member in section.value.members if member.key in PLACES]
    for member in members:
        if not is_left_out(member) and not (member.key.endswith("nvme_path") and member.value.value == "none"):
            yield PLACES[member.key], member.key_span, member.value
    precision = document.member("mixed_precision")
    if precision is not None and precision.value.value in PRECISIONS:
        enabled = Node("bool", True, precision.value.span)
        yield (precision.value.value, "enabled"), precision.key_span, enabled
    for path, kind, value in _DEFAULTS:
        if path not in [PLACES[member.key] for member in members]:
            yield path, section.key_span, Node(kind, value, section.key_span)


def _tree(placed: list[Placed], span: Span) -> Node:
    """Return an object node with the given values at the given paths."""
    members: list[Member] = []
    for key in dict.fromkeys(path[0] for path, _, _ in placed):
        below = [(path[1:], key_span, node) for path, key_span, node in placed if path[0] == key]
        path, key_span, node = below[0]
        members.append(Member(str(key), key_span, _tree([b for b in below if b[0]], key_span) if path else node))
    return object_node(members, span)
