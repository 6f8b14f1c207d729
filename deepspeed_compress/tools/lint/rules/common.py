"""Facts about a configuration that several rules need, and the findings that they report."""

from collections.abc import Mapping
from typing import Any

from deepspeed_compress.diagnostics import Diagnostic, Fix, Path, at, at_key, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, rename, replace
from deepspeed_compress.tools.lint.keys import OUR_SECTION, closest
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.values import AUTO, integer, show

HUGGING_FACE = frozenset({"hf", "accelerate"})
ZERO = "zero_optimization"
OFFLOADS = frozenset({"cpu", "nvme"})
ONE_BIT = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})
"""Optimizers that DeepSpeed no longer has."""
BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Keys of zero_optimization that Hugging Face computes from the hidden size of the model."""
_FP32 = ("fp32", "float32", "float", "torch.float32")
_PARALLELISM = (OUR_SECTION, "parallelism")


def finding(path: Path, what: str, instead: str, fix: Fix | None = None) -> Diagnostic:
    """Return a finding about the value at `path`. The remedy is to write `instead`."""
    return Diagnostic(at(*path), what, write(instead), fix)


def key_finding(path: Path, what: str, instead: str, fix: Fix | None = None) -> Diagnostic:
    """Return a finding about the key at the end of `path`. The remedy is to write `instead`."""
    return Diagnostic(at_key(*path), what, write(instead), fix)


def corrected(document: Document, path: Path, what: str, value: object, title: str, *, safe: bool = True) -> Diagnostic:
    """Return a finding about the value at `path`, whose remedy and fix are to write `value`."""
    return finding(path, what, show(value), fix(title, replace(document, path, value), safe=safe))


def unknown_word(document: Document, path: Path, names: Mapping[str, object], what: str, example: str) -> Diagnostic:
    """Return a finding about a word that is none of `names`, with the one that was probably meant."""
    close = closest(document.string(*path), names)
    if close is None:
        return finding(path, what, f"{example}, for instance")
    return finding(path, what, _if_meant(close), fix(f"Write {close}", replace(document, path, close), safe=False))


def unknown_parameter(
    document: Document, path: Path, names: Mapping[str, object] | frozenset[str], what: str
) -> Diagnostic:
    """Return a finding about a key that is none of `names`, with the one that was probably meant."""
    close = closest(str(path[-1]), names)
    if close is None:
        return key_finding(path, what, "nothing: remove the key")
    free = not document.has(*path[:-1], close)
    renamed = fix(f"Rename to {close}", rename(document, path, close), safe=False) if free else None
    return key_finding(path, what, _if_meant(close), renamed)


def _if_meant(name: str) -> str:
    return f'"{name}", if you meant that'


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


def zenflow(document: Document) -> bool:
    return isinstance(document.get(ZERO, "zenflow"), dict)


def scatters(document: Document) -> bool:
    """Return True if gradients are reduce-scattered, which stages 2 and 3 do by default."""
    return stage(document) in (2, 3) and document.truth(ZERO, "reduce_scatter", default=True) is True


def bf16(document: Document) -> bool:
    """Return True if the model is in bf16. The old name of the section is used if the new one is missing."""
    return document.is_true("bf16" if document.get("bf16") is not None else "bfloat16", "enabled")


def fp16(document: Document) -> bool:
    """Return True if the model is in fp16."""
    return document.is_true("fp16", "enabled")


def left_open(document: Document) -> bool:
    """Return True if Hugging Face fills in the precision."""
    return AUTO in (document.get("fp16", "enabled"), document.get("bf16", "enabled"))


def chooses_bf16_optimizer(document: Document) -> bool:
    """Return True if DeepSpeed takes BF16_Optimizer, as it does with bf16, stage 1 and accumulation in fp32."""
    wide = document.get("data_types", "grad_accum_dtype") in _FP32
    return wide and bf16(document) and stage(document) == 1 and offload(document, "offload_optimizer") != "cpu"


def optimizer(document: Document) -> str:
    """Return the optimizer's type in lower case, as DeepSpeed compares it, or an empty string."""
    return document.string("optimizer", "type").lower()


def params(document: Document, what: str) -> Mapping[str, Any]:
    """Return the parameters of the optimizer or the scheduler."""
    return document.section(what, "params")


def parameter_paths(document: Document) -> list[Path]:
    """Return the paths of the parameters of the optimizer and of the scheduler."""
    return [(part, "params", key) for part in ("optimizer", "scheduler") for key in params(document, part)]


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


def text_model(model: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the configuration of a model's text part, which is the whole of most models."""
    text = (model or {}).get("text_config")
    return text if isinstance(text, dict) else model or {}
