"""What a rule of the linter is: its words, two examples, and what DeepSpeed itself does with the wrong one."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deepspeed_compress.diagnostics import Diagnostic, Severity
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.options import Framework
from deepspeed_compress.tools.rules import Rule

__all__ = ["Check", "Context", "LintRule", "Proof", "accepts", "ignores", "raises", "rule", "unproved", "warns"]


@dataclass(frozen=True, slots=True)
class Context:
    """What the user says about the run; None is not known, so that rules do not guess."""

    world_size: int | None = None
    ranks_per_node: int | None = None
    framework: Framework | None = None
    model: Mapping[str, Any] | None = None
    """Content of the config.json of a Hugging Face model."""
    gpu_memory: int | None = None
    """Bytes."""
    bandwidth: float | None = None
    """Gbit/s between nodes."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What DeepSpeed does with the bad example. `text`: a regular expression of its message, or a reason."""

    kind: Literal["raises", "ignores", "warns", "accepts", "unproved"]
    text: str = ""


def raises(pattern: str) -> Proof:
    """DeepSpeed fails with a message in which `pattern` is found."""
    return Proof("raises", pattern)


def ignores() -> Proof:
    """DeepSpeed starts as though the setting were not there."""
    return Proof("ignores")


def warns(pattern: str) -> Proof:
    """DeepSpeed starts, and logs a message in which `pattern` is found."""
    return Proof("warns", pattern)


def accepts(why_wrong: str) -> Proof:
    """DeepSpeed starts without a word."""
    return Proof("accepts", why_wrong)


def unproved(reason: str) -> Proof:
    """What DeepSpeed does could not be seen, for `reason`."""
    return Proof("unproved", reason)


Check = Callable[[Document, Context], Iterable[Diagnostic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LintRule(Rule):
    """A rule of the linter; documentation and tests are made from it.

    Its reason names the file of DeepSpeed that it comes from.
    """

    severity: Severity
    wrong: str
    """Text of a configuration in which the rule finds one thing."""
    right: str
    """Text of a configuration in which it finds nothing."""
    proof: Proof
    context: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Context that the examples need."""
    check: Check


def rule(
    *,
    code: str,
    name: str,
    severity: Severity,
    family: str,
    summary: str,
    reason: str,
    wrong: str,
    right: str,
    proof: Proof,
    context: Mapping[str, Any] | None = None,
) -> Callable[[Check], LintRule]:
    """Makes a rule of the check below it. `code`: DSC and three digits; the others are fields of LintRule."""
    return lambda check: LintRule(
        code=code,
        name=name,
        severity=severity,
        family=family,
        summary=summary,
        reason=reason,
        wrong=wrong,
        right=right,
        proof=proof,
        context=context or {},
        check=check,
    )
