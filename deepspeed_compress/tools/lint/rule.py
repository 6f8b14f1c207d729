"""What a rule is: a code, a reason, two examples, a function, and what DeepSpeed itself does with the bad example."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.hit import Edit, Fix, Hit, Path, Span
from deepspeed_compress.tools.lint.options import Framework, Severity

__all__ = [
    "Context",
    "Edit",
    "Fix",
    "Hit",
    "Path",
    "Proof",
    "Rule",
    "Severity",
    "Span",
    "accepts",
    "ignores",
    "raises",
    "unproved",
    "warns",
]


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


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table of rules; documentation and tests are made from it."""

    code: str
    """DSC and three digits."""
    name: str
    """Words joined by hyphens."""
    severity: Severity
    family: str
    summary: str
    """One line."""
    rationale: str
    """Why it matters, and the file of DeepSpeed that it comes from."""
    bad: str
    """Text of a configuration that the rule finds once."""
    good: str
    """Text of a configuration that is right."""
    check: Callable[[Document, Context], Iterable[Hit]]
    proof: Proof
    context: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Context that the examples need."""
