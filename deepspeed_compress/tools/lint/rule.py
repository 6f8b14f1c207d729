"""Definition of a linter rule: a check whose docstring documents the rule.

A rule is a decorated check. Its name is the name of the function, its code determines its family, and `docstring` reads
its texts and examples.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.diagnostics import Diagnostic, Severity
from deepspeed_compress.tools.lint.docstring import NO_TEXTS, Proof, read_texts
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.options import Framework
from deepspeed_compress.tools.outputs.report import Rule


@dataclass(frozen=True, slots=True)
class Context:
    """Facts about the run that the user states. None means unknown, in which case rules do not guess."""

    world_size: int | None = None
    ranks_per_node: int | None = None
    framework: Framework | None = None
    model: Mapping[str, Any] | None = None
    """Content of the config.json of a Hugging Face model."""
    gpu_memory: int | None = None
    """Bytes of memory per GPU."""
    bandwidth: float | None = None
    """Bandwidth between nodes in Gbit/s."""


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
"""Families by the first of their codes, in order."""


def family_of(code: str) -> str:
    """Return the family of a rule, which its code determines."""
    starts = list(_FAMILIES)
    return _FAMILIES[starts[bisect_right(starts, code) - 1]]


def rule(code: str, severity: Severity) -> Callable[[Check], LintRule]:
    """Return a decorator that turns a check into a rule.

    Args:
        code: DSC and three digits.
        severity: Severity of all findings of the rule.
    """

    def decorate(check: Check) -> LintRule:
        # `python -OO` removes docstrings. Findings do not need them; the command `rule` does, and says so.
        texts, name = read_texts(check.__doc__) if check.__doc__ else NO_TEXTS, check.__name__.replace("_", "-")
        return LintRule(code=code, name=name, severity=severity, family=family_of(code), check=check, **texts)

    return decorate
