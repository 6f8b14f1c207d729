"""Facts about a configuration that several rules need, and the findings that they report."""

from collections.abc import Mapping
from typing import Any

from deepspeed_compress.diagnostics import Diagnostic, Fix, Path, at, at_key, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.values import integer

HUGGING_FACE = frozenset({"hf", "accelerate"})
ZERO = "zero_optimization"
OFFLOADS = frozenset({"cpu", "nvme"})
_PARALLELISM = (OUR_SECTION, "parallelism")


def finding(path: Path, what: str, instead: str, fix: Fix | None = None) -> Diagnostic:
    """Return a finding about the value at `path`. The remedy is to write `instead`."""
    return Diagnostic(at(*path), what, write(instead), fix)


def key_finding(path: Path, what: str, instead: str, fix: Fix | None = None) -> Diagnostic:
    """Return a finding about the key at the end of `path`. The remedy is to write `instead`."""
    return Diagnostic(at_key(*path), what, write(instead), fix)


def stage(document: Document) -> int | None:
    """Return the ZeRO stage, or None if it is left to another program ("auto") or cannot be read."""
    ours = document.integer(*_PARALLELISM, "zero_stage")
    if ours is not None:
        return ours
    zero = document.get(ZERO)
    if not isinstance(zero, dict):
        return int(zero is True)
    value = zero.get("stage", 0)
    return int(value) if isinstance(value, bool) else integer(value)


def offload(document: Document, what: str) -> str | None:
    """Return the device of `offload_optimizer` or `offload_param`, or None if it is not a valid one."""
    device = document.string(ZERO, what, "device")
    return device if device in OFFLOADS else None


def bf16(document: Document) -> bool:
    """Return True if the model is in bf16. The old name of the section is used if the new one is missing."""
    return document.is_true("bf16" if document.get("bf16") is not None else "bfloat16", "enabled")


def fp16(document: Document) -> bool:
    """Return True if the model is in fp16."""
    return document.is_true("fp16", "enabled")


def optimizer(document: Document) -> str:
    """Return the optimizer's type in lower case, as DeepSpeed compares it, or an empty string."""
    return document.string("optimizer", "type").lower()


def params(document: Document, what: str) -> Mapping[str, Any]:
    """Return the parameters of the optimizer or the scheduler."""
    return document.section(what, "params")


def stages(document: Document) -> int:
    """Return the number of pipeline stages in the configuration, or 1."""
    ours = document.integer(*_PARALLELISM, "pipeline")
    return max(ours or document.integer("pipeline", "stages") or 1, 1)


def tensor_size(document: Document) -> int:
    """Return the number of tensor-parallel ranks in the configuration, or 1."""
    ours = document.integer(*_PARALLELISM, "tensor")
    return max(ours or document.integer("tensor_parallel", "autotp_size") or 1, 1)


def hugging_face(context: Context) -> bool:
    """Return True if Hugging Face reads the configuration."""
    return context.framework in HUGGING_FACE
