"""Definition of a doctor rule: its texts, its check, and the data that the check needs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from deepspeed_compress.diagnostics import Diagnostic, Severity
from deepspeed_compress.tools.doctor.case import Case
from deepspeed_compress.tools.outputs.report import Rule

Check = Callable[[Case], Iterable[Diagnostic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRule(Rule):
    """Rule of the doctor. Its code is its name, under which docs/doctor.md explains it."""

    needs: tuple[str, ...]
    """Data that must have been recorded, in the terms of `Case.lacks`."""
    check: Check = field(repr=False)


def rule(severity: Severity | None, summary: str, *needs: str) -> Callable[[Check], DoctorRule]:
    """Return a decorator that turns a check into a rule. The rule has the name of the function.

    Args:
        severity: "error" if the model does not learn, "warning" if time, memory or bytes are lost, otherwise "info".
            None if each diagnostic states its own. The output calls them critical, serious and notice.
        summary: Short description of what the rule checks.
        *needs: Data that must have been recorded, in the terms of `Case.lacks`.
    """

    def decorate(check: Check) -> DoctorRule:
        name = check.__name__.replace("_", "-")
        return DoctorRule(code=name, name=name, severity=severity, summary=summary, needs=needs, check=check)

    return decorate
