"""Contents of the report on one run of the linter or the doctor, and the texts of their rules.

A module of rules decorates its checks, which turns them into rules:

    @rule("DSC401", "warning")
    def zero_without_stage(document: Document, context: Context) -> Findings: ...
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TypeVar

from deepspeed_compress.diagnostics import SEVERITIES, Diagnostic, Severity


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


@dataclass(frozen=True, slots=True)
class Report:
    """Diagnostics of all files, with further data for outputs."""

    diagnostics: tuple[Diagnostic, ...]
    files: int
    rules: tuple[Rule, ...] = ()
    """All rules that were applied."""
    fixed: int = 0
    colour: bool = False
    quiet: bool = False

    @property
    def closing(self) -> tuple[str, ...]:
        """Return the summary as the closing lines, or nothing if the report is quiet."""
        return () if self.quiet else (self.summary,)

    @property
    def summary(self) -> str:
        """Return the last line for people."""
        fixed = f"Fixed {plural(self.fixed, 'finding')}. " if self.fixed else ""
        if not self.diagnostics:
            return f"{fixed}{plural(self.files, 'file')} checked, nothing found."
        kinds = [
            plural(count, kind) if kind != "info" else f"{count} info"
            for kind in SEVERITIES
            if (count := sum(one.severity == kind for one in self.diagnostics))
        ]
        found = f"{plural(len(self.diagnostics), 'finding')} in {plural(self.files, 'file')}: {', '.join(kinds)}."
        safe = sum(option(one) == "--fix" for one in self.diagnostics)
        return fixed + found + (f" --fix corrects {safe}." if safe else "")


def option(diagnostic: Diagnostic) -> str:
    """Return the option that applies the fix, or an empty string if there is no fix."""
    fix = diagnostic.fix
    return "" if fix is None else "--fix" if fix.safe else "--fix --unsafe-fixes"


def message(diagnostic: Diagnostic) -> str:
    """Return what is wrong, and where in the configuration."""
    return f"{diagnostic.message} (at {diagnostic.pointer})" if diagnostic.place.path else diagnostic.message


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 file`, `2 files`, `1,000 files`."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def lines(texts: Iterable[str]) -> str:
    """Return the texts, each on a line of its own."""
    return "".join(f"{text}\n" for text in texts)
