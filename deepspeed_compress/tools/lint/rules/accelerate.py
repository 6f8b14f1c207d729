"""The DeepSpeed configuration that Accelerate derives from its own, and rules on settings that never reach DeepSpeed.

Values keep their places in Accelerate's file. Settings that Accelerate does not pass on remain in `Document.origin`.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path as FilePath

from deepspeed_compress.diagnostics import Diagnostic, Path, Span, at, at_key, write
from deepspeed_compress.tools.lint.document import Document, Kind, Member, Node, object_node
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.values import number, show, text_number

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


def find_file(document: Document, name: str) -> str | None:
    """Return the path of a file that `document` names, or None if it does not exist.

    Programs open the name relative to their working directory, which is usually above the directory of `document`.
    """
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


_PRECISION = "mixed_precision"
_TYPE = "distributed_type"
_LAUNCHED = frozenset(
    {
        NAME,
        "zero3_init_flag",
        "deepspeed_hostfile",
        "deepspeed_exclusion_filter",
        "deepspeed_inclusion_filter",
        "deepspeed_moe_layer_cls_names",
        "deepspeed_multinode_launcher",
        _PRECISION,
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
    }
)
"""Keys of the section that the launcher reads itself."""
_YAML = (".yaml", ".yml")
_PATHS = frozenset(key for key in PLACES if key.endswith("nvme_path"))


@rule("DSC730", "error")
def accelerate_settings_beside_file(document: Document, context: Context) -> Findings:
    """Accelerate's configuration names a DeepSpeed file, and has settings that belong in that file.

    With deepspeed_config_file, Accelerate refuses settings of ZeRO, clipping, accumulation, offloading and
    mixed_precision in its own configuration (accelerate/utils/dataclasses.py).

    Wrong: {"distributed_type": "DEEPSPEED", "num_processes": 1,
        "deepspeed_config": {"deepspeed_config_file": "configs/zero0_int4.json", "zero_stage": 3}}
    Right: {"distributed_type": "DEEPSPEED", "num_processes": 1,
        "deepspeed_config": {"zero_stage": 3, "zero3_save_16bit_model": true}}
    Context: {"framework": "accelerate"}
    Proof: raises will be ignored
    """
    # Report all such settings in one finding, because they are a single mistake.
    if document.origin is None or file_name(document) is None or not is_used(document):
        return
    beside = [member for member in settings(document) if member.key in PLACES]
    precision = document.origin.by_key.get(_PRECISION)
    if precision is not None and precision.value.value is not None:
        beside.append(precision)
    if beside:
        names = ", ".join(member.key for member in beside)
        what = f"{names} together with {NAME}, which Accelerate refuses (allowed: in that file only)"
        first = beside[0]
        path = (first.key,) if first is precision else (SECTION, first.key)
        instead = f"them into {show(file_name(document))}, and remove them here"
        yield Diagnostic(at_key(*path, span=first.key_span), what, write(instead))


@rule("DSC731", "warning")
def accelerate_key_dropped(document: Document, context: Context) -> Findings:
    """deepspeed_config has a key that Accelerate does not pass on.

    Accelerate knows a dozen keys of this section (accelerate/utils/launch.py). It silently drops all others, such as
    DeepSpeed's section optimizer. It reads paths for NVMe but does not pass them on, nor gradient_clipping if that is 0
    (accelerate/utils/dataclasses.py): DeepSpeed then clips by its default of 1.0.

    Wrong: {"distributed_type": "DEEPSPEED", "num_processes": 1,
        "deepspeed_config": {"zero_stage": 2, "train_micro_batch_size_per_gpu": 4}}
    Right: {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": {"zero_stage": 2}}
    Context: {"framework": "accelerate"}
    Proof: accepts the setting has no effect
    """
    # Report all such keys in one finding: a DeepSpeed configuration was placed inside Accelerate's.
    dropped = [member for member in settings(document) if _is_dropped(document, member)]
    if dropped and is_used(document):
        several = len(dropped) > 1
        keys, them = ", ".join(show(member.key) for member in dropped), "them" if several else "it"
        what = f"Accelerate does not pass on {keys}, and DeepSpeed never sees {them}"
        instead = f"{them} into a configuration of DeepSpeed, named by {NAME}, or remove {them}"
        yield Diagnostic(at_key(SECTION, dropped[0].key, span=dropped[0].key_span), what, write(instead))


def _is_dropped(document: Document, member: Member) -> bool:
    if member.key in _PATHS:
        return member.value.value not in (None, "none") and file_name(document) is None
    return is_left_out(member) or (member.key not in PLACES and member.key not in _LAUNCHED)


@rule("DSC732", "warning")
def accelerate_file_unusable(document: Document, context: Context) -> Findings:
    """Accelerate's configuration names a file that does not exist, or a YAML file.

    Accelerate opens the file from the directory in which it is started (accelerate/utils/deepspeed.py). There is no
    such file in this directory, next to the configuration, or in a directory above it. Accelerate's own configuration
    may be YAML, but it reads DeepSpeed's with Python's json.

    Wrong: {"distributed_type": "DEEPSPEED", "num_processes": 1,
        "deepspeed_config": {"deepspeed_config_file": "no/such/ds_config.json"}}
    Right: {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": {"zero_stage": 2}}
    Context: {"framework": "accelerate"}
    Proof: raises Expected a string path to an existing deepspeed config
    """
    name = file_name(document) if document.origin is not None and is_used(document) else None
    if name is None:
        return
    place = at(SECTION, NAME, span=next(member.value.span for member in settings(document) if member.key == NAME))
    if find_file(document, name) is None:
        what = f"{show(name)} was not found here, next to this file, or in a directory above it"
        yield Diagnostic(place, what, write("the path of a configuration"))
    elif name.endswith(_YAML):
        what = f"{show(name)} is YAML by its name, which Accelerate reads as JSON and stops at"
        yield Diagnostic(place, what, write("the same settings into a .json file"))


@rule("DSC733", "warning")
def accelerate_deepspeed_unused(document: Document, context: Context) -> Findings:
    """deepspeed_config has no effect, because distributed_type does not start DeepSpeed.

    accelerate launch starts DeepSpeed only with distributed_type DEEPSPEED (accelerate/commands/launch.py), or with
    --use_deepspeed on the command line: with MULTI_GPU, FSDP, NO and others the section has no effect.

    Wrong: {"distributed_type": "MULTI_GPU", "num_processes": 1, "deepspeed_config": {"zero_stage": 2}}
    Right: {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": {"zero_stage": 2}}
    Context: {"framework": "accelerate"}
    Proof: unproved it needs the GPUs that the program would be launched on
    """
    if document.origin is not None and not is_used(document):
        kind = document.origin.by_key[_TYPE]
        what = f"with {show(kind.value.value)} Accelerate starts no DeepSpeed, and {SECTION} has no effect"
        instead = f'"DEEPSPEED", or remove {SECTION}; --use_deepspeed on the command line applies it too'
        yield Diagnostic(at(_TYPE, span=kind.value.span), what, write(instead))
