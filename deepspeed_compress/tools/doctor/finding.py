"""What a rule is, and what it finds."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from deepspeed_compress.tools.doctor.case import Case

__all__ = ["SEVERITIES", "Finding", "Rule", "Severity"]

Severity = Literal["critical", "serious", "notice"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
"""Worst first: the model does not learn; time, memory or bytes are lost; worth knowing."""


@dataclass(frozen=True)
class Finding:
    """What holds a run back.

    `evidence`: figures by what they are. `steps`: the first and the last optimizer step that they are of. `wanted`: the
    configuration as it should be, None where no setting helps. `weight`: from 0 to 1, what part of a step, of the
    bytes or of the memory it is about; of two findings alike in severity the heavier one comes first.
    """

    symptom: str
    evidence: Mapping[str, Any]
    remedy: str
    steps: tuple[int, int]
    wanted: Mapping[str, Any] | None = None
    weight: float = 1.0
    severity: Severity | None = None
    """None for that of the rule."""


@dataclass(frozen=True)
class Rule:
    """A row of the table of rules.

    `question`: what it looks at, in a few words. `needs`: what must have been recorded, in the words of `Case.lacks`.
    """

    name: str
    severity: Severity
    question: str
    needs: tuple[str, ...]
    find: Callable[[Case], Iterable[Finding]] = field(repr=False)

    @property
    def page(self) -> str:
        """Where it is explained."""
        return f"docs/doctor.md#{self.name}"
