"""A term: one part of a predicted step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """Part of the seconds of a step.

    Attributes:
        name: Name of the work or message.
        kind: Resource that limits it: "compute", "memory", "launch", "bubble", or the name of a link.
        seconds: Seconds that the step becomes longer by.
        busy: Seconds that the resource works, of which `busy - seconds` are hidden behind computation.
        inside: Bytes that a rank sends in a step to others in its node.
        outside: Bytes that a rank sends in a step to other nodes.
        formula: How `seconds` follow from the layout, with its figures.
        source: Origin of the constant that is used.
    """

    name: str
    kind: str
    seconds: float
    busy: float
    inside: float
    outside: float
    formula: str
    source: str


def local(name: str, kind: str, seconds: float, formula: str, source: str) -> Term:
    """Return a term that sends nothing and hides behind nothing."""
    return Term(name, kind, seconds, seconds, 0.0, 0.0, formula, source)
