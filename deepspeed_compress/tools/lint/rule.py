"""Definition of a linter rule: a check whose docstring documents the rule, and the findings that checks report.

A rule is a decorated check. Its name is the name of the function, its code determines its family, and the docstring
of the function has its texts and examples in a fixed form: the summary, the reason, and fields with names in front:

    Wrong: configuration in which the rule finds one problem
    Right: configuration in which it finds nothing
    Context: fields of Context that both need, if any
    Proof: behavior of DeepSpeed for the wrong configuration (see `Proof`)

A value may continue on the next lines. Configurations are JSON, which the page of rules shows indented. A configuration
that is not JSON, or that must be shown as it is, stands in an indented block below the name of its field.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.diagnostics import Diagnostic, Fix, Path, Severity, at, at_key, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.keys import closest
from deepspeed_compress.tools.lint.options import Framework
from deepspeed_compress.tools.lint.values import show
from deepspeed_compress.tools.outputs.report import Rule

_FIELD = re.compile(r"^(Wrong|Right|Context|Proof):", re.MULTILINE)

PROOFS: Mapping[str, str] = {
    "raises": "DeepSpeed fails with a message that matches `{}`.",
    "ignores": "DeepSpeed starts and ignores it.",
    "warns": "DeepSpeed starts and logs a message that matches `{}`.",
    "accepts": "DeepSpeed starts without a message: {}.",
    "unproved": "Not tested: {}.",
}
"""Kinds of proofs with the sentence of each on the page of rules."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Behavior of DeepSpeed for the wrong example.

    The kinds are: raises (an error that matches `text`), warns (it starts and logs a message that matches `text`),
    ignores (it starts as if the setting were absent), accepts (it starts without a message, and `text` says what is
    wrong nevertheless), and unproved (the behavior could not be observed, for the reason `text`).
    """

    kind: str
    text: str = ""


def read_texts(docstring: str) -> dict[str, Any]:
    """Return the fields of `LintRule` that the docstring of a check has.

    Raises:
        ValueError: The docstring does not have the form of this module's description.
    """
    head, *parts = _FIELD.split(inspect.cleandoc(docstring))
    fields = dict(zip(parts[::2], parts[1::2], strict=True))
    missing = {"Wrong", "Right", "Proof"} - fields.keys()
    if missing:
        raise ValueError(f"{docstring.strip()[:60]!r} has no field {' or '.join(sorted(missing))}")
    summary, _, reason = head.strip().partition("\n\n")
    kind, _, proof = _joined(fields["Proof"]).partition(" ")
    if kind not in PROOFS:
        raise ValueError(f"{kind!r} is not a kind of proof (allowed: {', '.join(PROOFS)})")
    return {
        "summary": summary,
        "reason": _joined(reason),
        "wrong": _example(fields["Wrong"]),
        "right": _example(fields["Right"]),
        "proof": Proof(kind, proof),
        "context": json.loads(fields.get("Context", "{}")),
    }


def _joined(lines: str) -> str:
    return " ".join(lines.split())


def _example(value: str) -> str:
    """Return the text of an example: an indented block as it is, JSON with one key per line."""
    if value.startswith("\n"):
        return textwrap.dedent(value).strip("\n") + "\n"
    return json.dumps(json.loads(value), indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class Context:
    """Facts about the run that the user states. None means unknown, in which case rules do not guess."""

    world_size: int | None = None
    ranks_per_node: int | None = None
    framework: Framework | None = None
    model: Mapping[str, Any] | None = None
    """Content of the config.json of a Hugging Face model."""

    @property
    def hugging_face(self) -> bool:
        """Return True if Hugging Face reads the configuration."""
        return self.framework in ("hf", "accelerate")

    def is_pipelined(self, document: Document) -> bool:
        """Return True if the model is a pipeline. Hugging Face ignores the section `pipeline`, whatever it says."""
        return not self.hugging_face if document.has("pipeline") else document.stages > 1


Findings = Iterator[Diagnostic]
Check = Callable[[Document, Context], Iterable[Diagnostic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LintRule(Rule):
    """Rule of the linter. Its documentation and tests are generated from it.

    Its reason names the file of DeepSpeed that it is based on.
    """

    severity: Severity
    wrong: str
    """Text of a configuration in which the rule finds one problem."""
    right: str
    """Text of a configuration in which it finds nothing."""
    proof: Proof
    context: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Context that the examples need."""
    check: Check


_FAMILIES = {
    "DSC000": "syntax",
    "DSC010": "types",
    "DSC100": "keys",
    "DSC110": "removed",
    "DSC200": "batch",
    "DSC300": "precision",
    "DSC320": "reduction",
    "DSC400": "zero",
    "DSC500": "optimizer",
    "DSC520": "schedulers",
    "DSC600": "pipeline",
    "DSC620": "tensor",
    "DSC700": "auto",
    "DSC710": "hugging-face",
    "DSC730": "accelerate",
    "DSC740": "lightning",
    "DSC800": "silent",
    "DSC900": "compress",
}
"""Families of rules by the first of their codes."""


def rule(code: str, severity: Severity) -> Callable[[Check], LintRule]:
    """Return a decorator that turns a check into a rule.

    Args:
        code: DSC and three digits.
        severity: Severity of all findings of the rule.
    """

    def decorate(check: Check) -> LintRule:
        texts, name = read_texts(check.__doc__ or ""), check.__name__.replace("_", "-")
        family = _FAMILIES[max(start for start in _FAMILIES if start <= code)]
        return LintRule(code=code, name=name, severity=severity, family=family, check=check, **texts)

    return decorate


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


def corrected(document: Document, path: Path, what: str, value: object, title: str) -> Diagnostic:
    """Return a finding about the value at `path`, whose remedy and fix are to write `value`."""
    return finding(path, what, show(value), fix(title, replace(document, path, value)))


def meant(word: str, names: Iterable[str], otherwise: str) -> str:
    """Return what to write instead of `word`: the one of `names` that was probably meant, or else `otherwise`."""
    close = closest(word, names)
    return otherwise if close is None else f'"{close}", if you meant that'
