"""Rule on sections: plain values in place of an object."""

from collections.abc import Iterator

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.document import Document, Member
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.keys import keys, known_values
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import ZERO, finding
from deepspeed_compress.tools.lint.rules.types import misfits
from deepspeed_compress.tools.lint.values import means_auto, show


@rule("DSC018", "error")
def not_a_section(document: Document, context: Context) -> Findings:
    """A section is expected, and the value is not an object.

    DeepSpeed unpacks sections without a check (runtime/precision_config.py) and fails with a message about `**`. Its
    models refuse other values for offload_optimizer, offload_param and others (runtime/zero/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "fp16": true}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "fp16": {"enabled": true}}
    Proof: raises must be a mapping
    """
    for path, member in (*_plain_values(document), *_automatic_sections(document, context)):
        if (path, member.value.kind) not in _ACCEPTED and path not in _NEVER_READ:
            what = f"{show(member.value.value)} is not an object (allowed: an object)"
            meant = _in_full(path, member.value.value)
            instead = f'{{}} for the defaults, or leave "{path[-1]}" out' if meant is None else show(meant)
            correction = None if meant is None else fix("Write an object", replace(document, path, meant), safe=False)
            yield finding(path, what, instead, correction)


_ACCEPTED: frozenset[tuple[Path, str]] = frozenset(
    {
        ((ZERO,), "bool"),  # has its own rule
        (("bf16",), "null"),
        (("aio",), "null"),
        (("checkpoint", "writer"), "null"),
        (("expert_parallel",), "null"),
        (("optimizer", "params"), "null"),
        ((ZERO, "leaf_module"), "null"),
    }
)
"""Sections for which DeepSpeed accepts a plain value, with the kind of that value."""
_NEVER_READ: frozenset[Path] = frozenset({("inference",), ("msamp",)})
_MEANT_KEYS = {
    ZERO: "stage",
    "optimizer": "type",
    "scheduler": "type",
    "offload_optimizer": "device",
    "offload_param": "device",
}
"""Keys that a plain value in place of a section is probably meant for, by section."""


def _plain_values(document: Document) -> Iterator[tuple[Path, Member]]:
    for strict in (True, False):
        for path, key, member in misfits(document, strict=strict):
            if "object" in key.kinds and {*key.kinds} <= {"object", "null"}:
                yield path, member


def _automatic_sections(document: Document, context: Context) -> Iterator[tuple[Path, Member]]:
    """Yield sections that are "auto" if nothing drops the value. With a framework, DSC700 and DSC702 report them."""
    if context.framework in (None, "lightning"):
        for path, key, member in known_values(document, strict=False):
            if key.kinds == ("object",) and means_auto(member.value.value) and path in keys().sections:
                yield path, member


def _in_full(path: Path, value: object) -> dict[str, object] | None:
    """Return the section that a plain value probably stands for, or None."""
    key = _MEANT_KEYS.get(str(path[-1]))
    if isinstance(value, bool):
        has_switch = any(section.path == path and "enabled" in section.keys for section in keys().sections.values())
        return {"enabled": value} if has_switch else {"device": "cpu"} if key == "device" and value else None
    plain = isinstance(value, str | int) and not means_auto(value)
    return {key: value} if key is not None and plain else None
