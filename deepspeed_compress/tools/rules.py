"""What rules of the linter and the doctor have in common: words, and a check that stands below them.

A module of rules decorates its checks, which makes rules of them:

    @rule(code="DSC401", name="zero-without-stage", severity="warning", ...)
    def zero_without_stage(document: Document, context: Context) -> Iterator[Diagnostic]: ...
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypeVar

from deepspeed_compress.diagnostics import Diagnostic, Severity

__all__ = ["Rule", "rules_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The words of a rule. The linter and the doctor add what theirs need, and the check."""

    code: str
    name: str
    """Words joined by hyphens."""
    severity: Severity | None
    """None: each diagnostic says its own."""
    summary: str
    """One line."""
    reason: str = ""
    """Why it matters."""
    family: str = ""

    def attribute(self, diagnostic: Diagnostic) -> Diagnostic:
        """`diagnostic`, found by this rule."""
        severity = self.severity or diagnostic.severity
        return replace(diagnostic, code=self.code, name=self.name, severity=severity)


AnyRule = TypeVar("AnyRule", bound=Rule)


def rules_of(modules: Iterable[ModuleType], kind: type[AnyRule]) -> Iterator[AnyRule]:
    """The rules that `modules` define, in the order of their texts."""
    for module in modules:
        yield from (value for value in vars(module).values() if isinstance(value, kind))
