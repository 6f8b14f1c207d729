"""Shared parts of the rules of the linter and the doctor: the texts of a rule, followed by its check.

A module of rules decorates its checks, which turns them into rules:

    @rule("DSC401", "warning")
    def zero_without_stage(document: Document, context: Context) -> Findings: ...
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypeVar

from deepspeed_compress.diagnostics import Diagnostic, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Texts of a rule. The linter and the doctor each add the fields they need, and the check."""

    code: str
    name: str
    """Words joined by hyphens."""
    severity: Severity | None
    """Severity, or None if each diagnostic states its own."""
    summary: str
    """Summary in one line."""
    reason: str = ""
    """Reason why the rule matters."""
    family: str = ""

    def attribute(self, diagnostic: Diagnostic) -> Diagnostic:
        """Return `diagnostic` with the code, name and severity of this rule."""
        severity = self.severity or diagnostic.severity
        return replace(diagnostic, code=self.code, name=self.name, severity=severity)


AnyRule = TypeVar("AnyRule", bound=Rule)


def rules_of(modules: Iterable[ModuleType], kind: type[AnyRule]) -> Iterator[AnyRule]:
    """Yield the rules that `modules` define, in the order of their source."""
    for module in modules:
        yield from (value for value in vars(module).values() if isinstance(value, kind))
