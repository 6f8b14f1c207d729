"""Reader of the docstring of a check, which holds all texts of a rule.

It has a fixed form: the summary, the reason, and fields, each with its name in front:

    Wrong: configuration in which the rule finds one problem
    Right: configuration in which it finds nothing
    Context: fields of Context that both need, if any
    Proof: behavior of DeepSpeed for the wrong configuration (see `Proof`)

A value may continue on the next lines. Configurations are JSON, which the page of rules shows indented. A configuration
that is not JSON, or that must be shown as it is, stands in an indented block below the name of its field.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

_FIELD = re.compile(r"^(Wrong|Right|Context|Proof):", re.MULTILINE)

ProofKind = Literal["raises", "ignores", "warns", "accepts", "unproved"]


@dataclass(frozen=True, slots=True)
class Proof:
    """Behavior of DeepSpeed for the wrong example.

    The kinds are: raises (an error that matches `text`), warns (it starts and logs a message that matches `text`),
    ignores (it starts as if the setting were absent), accepts (it starts without a message, and `text` says what is
    wrong nevertheless), and unproved (the behavior could not be observed, for the reason `text`).
    """

    kind: ProofKind
    text: str = ""


class Texts(TypedDict):
    """Texts of a rule, as in `LintRule`."""

    summary: str
    reason: str
    wrong: str
    right: str
    proof: Proof
    context: Mapping[str, Any]


NO_TEXTS = Texts(summary="", reason="", wrong="", right="", proof=Proof("unproved"), context={})


def read_texts(docstring: str) -> Texts:
    """Return the texts in the docstring of a check.

    Raises:
        ValueError: The docstring does not have the form above.
    """
    head, *parts = _FIELD.split(inspect.cleandoc(docstring))
    fields = dict(zip(parts[::2], parts[1::2], strict=True))
    missing = {"Wrong", "Right", "Proof"} - fields.keys()
    if missing:
        raise ValueError(f"{docstring.strip()[:60]!r} has no field {' or '.join(sorted(missing))}")
    summary, _, reason = head.strip().partition("\n\n")
    return Texts(
        summary=summary,
        reason=_joined(reason),
        wrong=_example(fields["Wrong"]),
        right=_example(fields["Right"]),
        proof=_proof(_joined(fields["Proof"])),
        context=json.loads(fields.get("Context", "{}")),
    )


def _joined(lines: str) -> str:
    return " ".join(lines.split())


def _example(value: str) -> str:
    """Return the text of an example: an indented block as it is, JSON with one key per line."""
    if value.startswith("\n"):
        return textwrap.dedent(value).strip("\n") + "\n"
    return json.dumps(json.loads(value), indent=2) + "\n"


def _proof(value: str) -> Proof:
    kind, _, text = value.partition(" ")
    for known in get_args(ProofKind):
        if kind == known:
            return Proof(known, text)
    raise ValueError(f"{kind!r} is not a kind of proof (allowed: {', '.join(get_args(ProofKind))})")
