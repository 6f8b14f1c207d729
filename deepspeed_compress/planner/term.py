"""A term: one part of a predicted step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """Part of the seconds of a step.

    Attributes:
        name: What takes the time.
        kind: What would have to be faster: "compute", "memory", "launch", "bubble", or the name of a link.
        seconds: Seconds that the step becomes longer by.
        busy: Seconds that the resource works, of which `busy - seconds` are hidden behind computation.
        sent: Bytes that a rank sends in a step.
        formula: How `seconds` follow from the layout, with its figures.
        source: Origin of the constant that is used.
    """

    name: str
    kind: str
    seconds: float
    busy: float
    sent: float
    formula: str
    source: str
