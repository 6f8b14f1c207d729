"""What is reported of one run."""

from collections.abc import Iterable
from dataclasses import dataclass

from deepspeed_compress.tools.lint.finding import Finding
from deepspeed_compress.tools.lint.rule import Rule


@dataclass(frozen=True, slots=True)
class Report:
    """Findings of all files, and what else outputs need."""

    findings: tuple[Finding, ...]
    files: int
    rules: tuple[Rule, ...] = ()
    """All that could have been found."""
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
        if not self.findings:
            return f"{fixed}{plural(self.files, 'file')} checked, nothing found."
        kinds = [
            plural(count, kind) if kind != "info" else f"{count} info"
            for kind in ("error", "warning", "info")
            if (count := sum(finding.rule.severity == kind for finding in self.findings))
        ]
        found = f"{plural(len(self.findings), 'finding')} in {plural(self.files, 'file')}: {', '.join(kinds)}."
        safe = sum(finding.fixable == "--fix" for finding in self.findings)
        return fixed + found + (f" --fix corrects {safe}." if safe else "")


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def lines(texts: Iterable[str]) -> str:
    """Each text on a line."""
    return "".join(f"{text}\n" for text in texts)
