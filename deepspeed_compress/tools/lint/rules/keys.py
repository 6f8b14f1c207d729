"""Rules on keys that DeepSpeed does not know, or knows at another place."""

from deepspeed_compress.diagnostics import Diagnostic, Path
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.keys import OUR_SECTION, Section, closest, places, unknown_keys
from deepspeed_compress.tools.lint.rule import Context, Findings, key_finding, rule
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
_NEARLY = 0.9
_UNUSED = (("pipeline",), ("activation_checkpointing",))
"""Sections that Hugging Face does not read, which another rule reports."""
_MANY, _SHOWN = 10, 8
_PARTS_OF_OURS = frozenset({"gradients", "weights"})
_KEYS_OF_PARTS = frozenset(
    {"method", "bits", "block_size", "density", "error_feedback", "hierarchy", "overrides", "rank"}
)


def _unknown(document: Document, context: Context, *, strict: bool) -> Findings:
    """Report each key that is probably misspelled, and all other unknown keys of a section in one finding."""
    strange: dict[Path, list[str]] = {}
    foreign = _is_foreign(document, strict)
    for path, section in unknown_keys(document, strict=strict):
        key = str(path[-1])
        # Our own section is a key that DeepSpeed ignores.
        names = section.keys if section.path else {**section.keys, OUR_SECTION: None}
        if foreign and not section.path:
            strange.setdefault((), []).append(key)
        elif ours := _ours(document, path):
            yield ours
        elif _elsewhere(path, section) or (context.hugging_face and section.path in _UNUSED):
            continue
        elif key in _SAME_AS:
            yield key_finding(path, f'"{key}" is not a key of {_title(section.path)}', _SAME_AS[key])
        elif meant := closest(key, names):
            what = f'"{key}" is not a key of {_title(section.path)} (did you mean "{meant}"?)'
            yield key_finding(path, what, f'"{meant}", if you meant that')
        else:
            strange.setdefault(section.path, []).append(key)
    for where, keys in strange.items():
        yield _strange(where, keys)


def _is_foreign(document: Document, strict: bool) -> bool:
    """Return True if the file has so many unknown keys in the outermost object that it is of another program."""
    return sum(not section.path for _, section in unknown_keys(document, strict=strict)) > _MANY


def _title(section: Path) -> str:
    return name(section) or "the configuration"


def _strange(section: Path, keys: list[str]) -> Diagnostic:
    shown = ", ".join(f'"{key}"' for key in keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" * (len(keys) > _SHOWN))
    what = f"{shown} {'is not a key' if len(keys) == 1 else 'are not keys'} of {_title(section)}"
    many = "the configuration of DeepSpeed into a file of its own, if this is one of another program"
    instead = many if len(keys) > _MANY else f"nothing: remove the key{'s' * (len(keys) > 1)}"
    return key_finding((*section, keys[0]), what, instead)


def _ours(document: Document, path: Path) -> Diagnostic | None:
    """Return a finding about our section, or a part of it, that has another name or place; None for other keys."""
    key, value = str(path[-1]).lower().replace("-", "_"), document.get(*path)
    if isinstance(value, dict) and any(_is_part(value.get(part)) for part in _PARTS_OF_OURS):
        place: Path = (OUR_SECTION,)
    elif key in _PARTS_OF_OURS and _is_part(value):
        place = (OUR_SECTION, key)
    else:
        return None
    what = f'"{path[-1]}" is not read here, and compresses nothing'
    return key_finding(path, what, f"it as {name(place)}")


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and bool(value.keys() & _KEYS_OF_PARTS)


def _elsewhere(path: Path, section: Section) -> list[tuple[str, ...]]:
    """Return other sections that have the key, or none if it resembles a key of its own section."""
    return [] if closest(str(path[-1]), section.keys, _NEARLY) else places(path)


def _misplaced(document: Document, *, strict: bool) -> Findings:
    """Report all keys of a section that belong into the same other one in one finding: such a block was copied."""
    groups: dict[tuple[Path, ...], list[Path]] = {}
    foreign = _is_foreign(document, strict)
    for path, section in unknown_keys(document, strict=strict):
        found = [] if foreign and not section.path else _elsewhere(path, section)
        if found and _ours(document, path) is None:
            groups.setdefault((section.path, *found), []).append(path)
    for (section_path, *others), paths in groups.items():
        where = [name(place) or "the outermost object" for place in others]
        keys = ", ".join(f'"{path[-1]}"' for path in paths)
        are, them = ("are not keys", "them") if len(paths) > 1 else ("is not a key", "it")
        what = f"{keys} {are} of {name(section_path) or 'the outermost object'}, but of {' and '.join(where)}"
        yield key_finding(paths[0], what, f"{them} inside {' or '.join(where)}")


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
