"""What a rule of the doctor is: its words, and what must have been recorded for its check."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from deepspeed_compress.diagnostics import Diagnostic, Severity
from deepspeed_compress.tools.doctor.case import Case
from deepspeed_compress.tools.rules import Rule

__all__ = ["Check", "DoctorRule", "rule"]

Check = Callable[[Case], Iterable[Diagnostic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRule(Rule):
    """A rule of the doctor. Its code is its name, by which docs/doctor.md explains it."""

    needs: tuple[str, ...]
    """What must have been recorded, in the words of `Case.lacks`."""
    check: Check = field(repr=False)


def rule(
    *, name: str, severity: Severity | None, summary: str, needs: tuple[str, ...]
) -> Callable[[Check], DoctorRule]:
    """Makes a rule of the check below it. `summary`: what it looks at, in a few words.

    `severity`: an error where the model does not learn, a warning where time, memory or bytes are lost, else info; None
    where each diagnostic says it. The output calls them critical, serious and notice.
    """
    return lambda check: DoctorRule(code=name, name=name, severity=severity, summary=summary, needs=needs, check=check)
