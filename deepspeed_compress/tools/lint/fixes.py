"""Applies the fixes of findings to a text."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from deepspeed_compress.tools.lint.document import Document, parse
from deepspeed_compress.tools.lint.finding import Finding
from deepspeed_compress.tools.lint.hit import Edit, Fix

MAX_ROUNDS = 100
"""A fix may uncover another finding; a text that still changes after so many rounds shows a defect of a rule."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A text after its fixes, how many there were, and what is still wrong with it."""

    document: Document
    count: int
    remaining: tuple[Finding, ...]

    @property
    def text(self) -> str:
        return self.document.text


def apply(document: Document, lint: Callable[[Document], Iterable[Finding]], unsafe: bool = False) -> Fixed:
    """Fix what can be fixed, in rounds: fixes that touch the same characters follow one another."""
    count, findings = 0, tuple(lint(document))
    for _ in range(MAX_ROUNDS if document.fixable else 0):
        better = next(_improved(document, findings, unsafe), None)
        if better is None:
            break
        document, done = better
        count, findings = count + done, tuple(lint(document))
    return Fixed(document, count, findings)


def _improved(document: Document, findings: Iterable[Finding], unsafe: bool) -> Iterator[tuple[Document, int]]:
    """The document after as many fixes as go together, else after any single one that breaks nothing."""
    fixes = [fix for finding in findings if (fix := finding.hit.fix) is not None and (fix.safe or unsafe)]
    together = _compatible(fixes)
    for chosen in (together, *([fix] for fix in fixes[:MAX_ROUNDS])):
        text = edited(document.text, (edit for fix in chosen for edit in fix.edits))
        after = parse(text, document.path)
        if text != document.text and len(after.problems) <= len(document.problems):
            yield after, len(chosen)


def _compatible(fixes: Iterable[Fix]) -> list[Fix]:
    """Fixes that touch no character, and no place between two, that an earlier one touches."""
    chosen: list[Fix] = []
    taken: list[Edit] = []
    for fix in fixes:
        if not any(_collide(edit, other) for edit in fix.edits for other in taken):
            chosen.append(fix)
            taken += fix.edits
    return chosen


def _collide(one: Edit, other: Edit) -> bool:
    return one.span.start <= other.span.end and other.span.start <= one.span.end


def edited(text: str, edits: Iterable[Edit]) -> str:
    """`text` after edits that do not overlap."""
    for edit in sorted(edits, key=lambda edit: (edit.span.start, edit.span.end), reverse=True):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    return text


def diff(before: str, after: str, path: str) -> str:
    """A unified diff, as `patch` takes it."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
