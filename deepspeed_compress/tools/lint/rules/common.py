"""Names that several rules need, and the findings that they report."""

from collections.abc import Mapping
from typing import Any

from deepspeed_compress.diagnostics import Diagnostic, Fix, Path, at, at_key, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, rename, replace
from deepspeed_compress.tools.lint.keys import closest
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.values import show

HUGGING_FACE = frozenset({"hf", "accelerate"})
ZERO = "zero_optimization"
ONE_BIT = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})
"""Optimizers that DeepSpeed no longer has."""
BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
"""Keys of zero_optimization that Hugging Face computes from the hidden size of the model."""

READ_RAW: frozenset[Path] = frozenset({("tensor_parallel", "autotp_size")})
"""Keys of DeepSpeed's models that it also reads outside of them, where nothing is converted."""


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


def hugging_face(context: Context) -> bool:
    """Return True if Hugging Face reads the configuration."""
    return context.framework in HUGGING_FACE


def text_model(model: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the configuration of a model's text part, which is the whole of most models."""
    text = (model or {}).get("text_config")
    return text if isinstance(text, dict) else model or {}
