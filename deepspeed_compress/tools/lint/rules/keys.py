"""Rules on keys that DeepSpeed does not know, or knows at another place."""

from collections.abc import Iterator

from deepspeed_compress.diagnostics import Diagnostic, Fix, Path
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, move, rename
from deepspeed_compress.tools.lint.keys import OUR_SECTION, Section, closest, places, unknown_keys
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import hugging_face, key_finding
from deepspeed_compress.tools.lint.values import name

_SAME_AS = {
    "fp32_allreduce": '"communication_data_type": "fp32"',
    "allreduce_always_fp32": '"communication_data_type": "fp32"',
    "postscale_gradients": '"prescale_gradients": false',
    "max_grad_norm": '"gradient_clipping"',
    "grad_clip": '"gradient_clipping"',
    "clip_grad": '"gradient_clipping"',
    "zero_stage": '"zero_optimization": {"stage": ...}',
    "tensor_parallel_size": '"tensor_parallel": {"autotp_size": ...}',
    "gradient_accumulation_dtype": '"data_types": {"grad_accum_dtype": ...}',
    "offload": '"zero_optimization": {"offload_optimizer": {"device": "cpu"}}',
    "learning_rate": '"optimizer": {"params": {"lr": ...}}',
    "lr": '"optimizer": {"params": {"lr": ...}}',
}
"""Names that other programs or older versions of DeepSpeed use for a key, with what to write instead."""
_INFERENCE = frozenset(
    {
        "enable_cuda_graph",
        "injection_policy",
        "injection_policy_tuple",
        "kernel_inject",
        "max_out_tokens",
        "min_out_tokens",
        "mp_size",
        "replace_method",
        "replace_with_kernel_inject",
        "return_tuple",
        "save_mp_checkpoint_path",
        "training_mp_size",
        "use_triton",
    }
)
"""Keys of deepspeed.init_inference, which has a separate configuration."""
_SHARED_WITH_INFERENCE = frozenset({"tensor_parallel", "dtype", "moe"})
_NEARLY = 0.9
_MANY, _SHOWN = 10, 8
_PARTS_OF_OURS = frozenset({"gradients", "weights"})
_KEYS_OF_PARTS = frozenset(
    {"method", "bits", "block_size", "density", "error_feedback", "hierarchy", "overrides", "rank"}
)


def _unknown(document: Document, context: Context, *, strict: bool) -> Findings:
    """Report each key that is probably misspelled, and all other unknown keys of a section in one finding."""
    strange: dict[Path, list[str]] = {}
    if others := _of_another_program(document, strict):
        yield _strange((), others)
    for path, section in _unknown_keys(document, strict):
        place, key = _ours(document, path), str(path[-1])
        if place is not None and path[:-1] == place[:-1]:
            yield _ours_by_another_name(document, path)
        elif place is not None or _elsewhere(path, section) or _unread(section, context):
            continue
        elif key in _SAME_AS:
            yield key_finding(path, f'"{key}" is not a key of {_title(section.path)}', _SAME_AS[key])
        elif meant := _close(key, section):
            yield _misspelled(document, path, section, meant)
        else:
            strange.setdefault(section.path, []).append(key)
    for where, keys in strange.items():
        yield _strange(where, keys)


def _unknown_keys(document: Document, strict: bool) -> Iterator[tuple[Path, Section]]:
    """Yield the unknown keys that are meant for training.

    Keys of inference are left out. So are the keys of the outermost object if the file belongs to another program.
    """
    others, inference = bool(_of_another_program(document, strict)), bool(_for_inference(document))
    for path, section in unknown_keys(document, strict=strict):
        inferring = inference and path[0] in _INFERENCE | _SHARED_WITH_INFERENCE
        if not inferring and (section.path or not others):
            yield path, section


def _for_inference(document: Document) -> list[str]:
    return [key for key in document.data if key in _INFERENCE]


@rule("DSC104", "warning")
def inference_keys(document: Document, context: Context) -> Findings:
    """The file has keys of DeepSpeed's inference engine.

    deepspeed.init_inference has a configuration of its own (inference/config.py), with a different tensor_parallel. Its
    keys have no effect in a configuration for training.

    Wrong: {"train_batch_size": 8, "replace_with_kernel_inject": true}
    Right: {"train_batch_size": 8}
    Proof: ignores
    """
    found = _for_inference(document)
    if found:
        several = len(found) > 1
        what = f"{', '.join(found)} {'are keys' if several else 'is a key'} of deepspeed.init_inference"
        what += f", and deepspeed.initialize ignores {'them' if several else 'it'}"
        yield key_finding((found[0],), what, "nothing for training; for inference this file is not examined further")


def _of_another_program(document: Document, strict: bool) -> list[str]:
    """Return the unknown keys of the outermost object if they are many, whether or not some resemble DeepSpeed's."""
    found = [str(path[-1]) for path, section in unknown_keys(document, strict=strict) if not section.path]
    return found if len(found) > _MANY else []


def _unread(section: Section, context: Context) -> bool:
    """Return True if another rule reports that the whole section is not read."""
    return hugging_face(context) and section.path in (("pipeline",), ("activation_checkpointing",))


def _title(section: Path) -> str:
    return name(section) or "the configuration"


def _close(key: str, section: Section) -> str | None:
    # Our own section is a key that DeepSpeed ignores.
    return closest(key, section.keys if section.path else {**section.keys, OUR_SECTION: None})


def _misspelled(document: Document, path: Path, section: Section, close: str) -> Diagnostic:
    what = f'"{path[-1]}" is not a key of {_title(section.path)} (did you mean "{close}"?)'
    return key_finding(path, what, f'"{close}", if you meant that', _renamed(document, path, close))


def _strange(section: Path, keys: list[str]) -> Diagnostic:
    shown = ", ".join(f'"{key}"' for key in keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" * (len(keys) > _SHOWN))
    what = f"{shown} {'is not a key' if len(keys) == 1 else 'are not keys'} of {_title(section)}"
    many = "the configuration of DeepSpeed into a file of its own, if this is one of another program"
    instead = many if len(keys) > _MANY else f"nothing: remove the key{'s' * (len(keys) > 1)}"
    return key_finding((*section, keys[0]), what, instead)


def _renamed(document: Document, path: Path, to: str) -> Fix | None:
    """Return a fix that renames a key. It is not safe, because the new name is a guess that the user has to confirm."""
    foreign = to == OUR_SECTION and _ours(document, path) is None
    free = not document.has(*path[:-1], to) and not foreign
    return fix(f'Rename to "{to}"', rename(document, path, to), safe=False) if free else None


def _ours(document: Document, path: Path) -> Path | None:
    """Return the right place of a part of our section that has another name or place, else None."""
    key, value = str(path[-1]).lower().replace("-", "_"), document.get(*path)
    if not isinstance(value, dict):
        return None
    if any(_is_part(value.get(part)) for part in _PARTS_OF_OURS):
        return (OUR_SECTION,)
    return (OUR_SECTION, key) if key in _PARTS_OF_OURS and _is_part(value) else None


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and bool(value.keys() & _KEYS_OF_PARTS)


def _ours_by_another_name(document: Document, path: Path) -> Diagnostic:
    what = f'"{path[-1]}" is not the name of the section that compresses, and is ignored'
    return key_finding(path, what, f'"{OUR_SECTION}": rename it', _renamed(document, path, OUR_SECTION))


def _misplaced(document: Document, *, strict: bool) -> Findings:
    """Report all keys of a section that belong into the same other one in one finding: such a block was copied."""
    groups: dict[tuple[Path, ...], list[Path]] = {}
    for path, section in _unknown_keys(document, strict):
        place = _ours(document, path)
        found = _elsewhere(path, section)
        if place is not None and path[:-1] != place[:-1]:
            yield _ours_elsewhere(document, path, place)
        elif place is None and found:
            groups.setdefault((section.path, *found), []).append(path)
    for (section_path, *others), paths in groups.items():
        yield _misplaced_hit(document, section_path, others, paths)


def _elsewhere(path: Path, section: Section) -> list[tuple[str, ...]]:
    """Return other sections that have the key, or none if it resembles a key of its own section."""
    return [] if closest(str(path[-1]), section.keys, _NEARLY) else places(path)


def _misplaced_hit(document: Document, section: Path, found: list[Path], paths: list[Path]) -> Diagnostic:
    path, several = paths[0], len(paths) > 1
    where = [name(place) or "the outermost object" for place in found]
    keys = ", ".join(f'"{path[-1]}"' for path in paths)
    are = "are not keys" if several else "is not a key"
    what = f"{keys} {are} of {name(section) or 'the outermost object'}, but of {' and '.join(where)}"
    target: Path = (*found[0], path[-1])
    moved = fix(f"Move to {name(target)}", move(document, path, target), safe=False) if len(found) == 1 else None
    return key_finding(path, what, f"{'them' if several else 'it'} inside {' or '.join(where)}", moved)


def _ours_elsewhere(document: Document, path: Path, place: Path) -> Diagnostic:
    inside = name(path[:-1]) or "the outermost object"
    what = f'"{path[-1]}" is not a key of {inside}, where it compresses nothing'
    moved = fix(f"Move to {name(place)}", move(document, path, place), safe=False)
    return key_finding(path, what, f"it as {name(place)}, not inside {inside}: move it", moved)


@rule("DSC100", "warning")
def unknown_key(document: Document, context: Context) -> Findings:
    """DeepSpeed does not know a key, and ignores it.

    DeepSpeed reads the keys that it knows and ignores all others (runtime/config.py), so a misspelled key leaves the
    default in force. Keys that start with _, $ or # are regarded as comments.

    Wrong: {"train_batch_size": 8, "gradient_clippping": 1.0}
    Right: {"train_batch_size": 8, "gradient_clipping": 1.0}
    Proof: ignores
    """
    yield from _unknown(document, context, strict=False)


@rule("DSC101", "error")
def unknown_key_refused(document: Document, context: Context) -> Findings:
    """DeepSpeed does not know a key, and refuses it.

    Sections that are pydantic models, such as zero_optimization, fp16 and bf16, forbid other keys
    (runtime/config_utils.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "overlap_com": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "overlap_comm": true}}
    Proof: raises extra_forbidden
    """
    yield from _unknown(document, context, strict=True)


@rule("DSC102", "warning")
def misplaced_key(document: Document, context: Context) -> Findings:
    """A key is in the wrong section, and DeepSpeed ignores it.

    For example, offload_optimizer in the outermost object offloads nothing. It is a key of zero_optimization
    (runtime/zero/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "offload_optimizer": {"device": "cpu"}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Proof: ignores
    """
    yield from _misplaced(document, strict=False)


@rule("DSC103", "error")
def misplaced_key_refused(document: Document, context: Context) -> Findings:
    """A key is in the wrong section, and DeepSpeed refuses it.

    For example, DeepSpeed refuses aio in zero_optimization. It is a section in the outermost object
    (runtime/swap_tensor/aio_config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "aio": {"block_size": 1048576}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "aio": {"block_size": 1048576}, "checkpoint": {"writer": {"type": "python"}}}
    Proof: raises extra_forbidden
    """
    yield from _misplaced(document, strict=True)
