"""Definition of a linter rule: its texts, two examples, and what DeepSpeed does with the bad one."""

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


@dataclass(frozen=True, slots=True)
class Proof:
    """Behavior of DeepSpeed for the bad example. `text` is a regular expression for its message, or a reason."""

    kind: Literal["raises", "ignores", "warns", "accepts", "unproved"]
    text: str = ""


def raises(pattern: str) -> Proof:
    """State that DeepSpeed fails with a message that matches `pattern`."""
    return Proof("raises", pattern)


def ignores() -> Proof:
    """State that DeepSpeed starts as if the setting were absent."""
    return Proof("ignores")


def warns(pattern: str) -> Proof:
    """State that DeepSpeed starts and logs a message that matches `pattern`."""
    return Proof("warns", pattern)


def accepts(why_wrong: str) -> Proof:
    """State that DeepSpeed starts without a message. `why_wrong` explains what is wrong nevertheless."""
    return Proof("accepts", why_wrong)


def unproved(reason: str) -> Proof:
    """State that DeepSpeed's behavior could not be observed, for `reason`."""
    return Proof("unproved", reason)


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
    """Return a decorator that turns a check into a rule.

    `code` is DSC and three digits. All other arguments are fields of LintRule.
    """
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
