"""What is reported of one run."""

from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_compress.diagnostics import SEVERITIES, Diagnostic
from deepspeed_compress.tools.rules import Rule


@dataclass(frozen=True, slots=True)
class Report:
    """Diagnostics of all files, and what else outputs need."""

    diagnostics: tuple[Diagnostic, ...]
    files: int
    rules: tuple[Rule, ...] = ()
    """All that were applied."""
    fixed: int = 0
    colour: bool = False
    quiet: bool = False

    @property
    def closing(self) -> tuple[str, ...]:
        """The summary, unless it is not wanted."""
        return () if self.quiet else (self.summary,)

    @property
    def summary(self) -> str:
        """The last line for people."""
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
    """The option that applies the fix; empty without one."""
    fix = diagnostic.fix
    return "" if fix is None else "--fix" if fix.safe else "--fix --unsafe-fixes"


def message(diagnostic: Diagnostic) -> str:
    """What is wrong, and where in the configuration."""
    return f"{diagnostic.message} (at {diagnostic.pointer})" if diagnostic.place.path else diagnostic.message


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def lines(texts: Iterable[str]) -> str:
    """Each text on a line."""
    return "".join(f"{text}\n" for text in texts)
