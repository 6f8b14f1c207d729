"""Applies rules to a document."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from deepspeed_compress.diagnostics import Diagnostic, Place
from deepspeed_compress.errors import CompressError
from deepspeed_compress.tools.lint.accelerate import embedded
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.placeholders import without_placeholders
from deepspeed_compress.tools.lint.rule import Context, LintRule
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.scanner import parse
from deepspeed_compress.tools.lint.selection import Selection

_ALWAYS = ("DSC0", "DSC73")
"""Rules of the syntax, and of what Accelerate makes the configuration of."""


class RuleError(CompressError):
    """A rule failed by itself: a defect of the linter, not of the configuration."""


def lint_text(
    text: str,
    path: str = "",
    context: Context | None = None,
    selection: Selection | None = None,
) -> list[Diagnostic]:
    """What the rules find in a configuration, in the order of its lines."""
    return lint_document(parse(text, path), context or Context(), selection or Selection())


def lint_document(
    document: Document, context: Context, selection: Selection, rules: Sequence[LintRule] = RULES
) -> list[Diagnostic]:
    """What `rules` find in `document`, in the order of its lines."""
    document = embedded(document)
    found = [
        _located(rule, one, document)
        for rule in selection.choose(_that_apply(document, rules), document)
        for one in without_placeholders(document, rule.code, _check(rule, document, context))
    ]
    return sorted(found, key=lambda one: (one.place.region.start, one.code))


def _located(rule: LintRule, found: Diagnostic, document: Document) -> Diagnostic:
    """What is reported: of which rule, where in the text, and no fix of a text that stands for another."""
    fix = found.fix if document.fixable else None
    return replace(rule.attribute(found), place=document.locate(found.place), fix=fix)


def _that_apply(document: Document, rules: Iterable[LintRule]) -> Iterator[LintRule]:
    """Where nothing could be read, only the syntax can be spoken of."""
    return (rule for rule in rules if document.readable or rule.code.startswith(_ALWAYS))


def _check(rule: LintRule, document: Document, context: Context) -> list[Diagnostic]:
    try:
        found = list(rule.check(document, context))
    except Exception as error:
        raise RuleError(
            f"{document.path}: rule {rule.code} {rule.name} failed ({type(error).__name__}: {error}). "
            f"Write --ignore {rule.code} to go on without it, and report the file that it failed on."
        ) from error
    return [one for one in found if not document.problems or _is_read(document, one.place)]


def _is_read(document: Document, place: Place) -> bool:
    """Behind a syntax error, what seems to be missing may only be unread."""
    return place.span is not None or (bool(place.path) and document.has(*place.path))
