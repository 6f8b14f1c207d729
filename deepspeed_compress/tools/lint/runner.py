"""Application of rules to a document."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from deepspeed_compress.diagnostics import Diagnostic, LineIndex, Place
from deepspeed_compress.errors import CompressError
from deepspeed_compress.tools.lint.accelerate import embedded
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.placeholders import placeholders, without_placeholders
from deepspeed_compress.tools.lint.rule import Context, LintRule
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.scanner import parse
from deepspeed_compress.tools.lint.selection import Selection

_ALWAYS = ("DSC0", "DSC73")
"""Rules of the syntax and of Accelerate's configuration, which also apply if nothing could be read."""
MAX_FINDINGS = 100
"""Maximum number of findings to report per rule and file. The last one may state how many more there are."""


class RuleError(CompressError):
    """Error raised if a rule fails, which is a defect of the linter and not of the configuration."""


def lint_text(text: str, path: str = "", context: Context | None = None) -> list[Diagnostic]:
    """Return the findings in the text of a configuration, in the order of its lines."""
    return lint_document(parse(text, path), context or Context(), Selection())


def lint_document(
    document: Document, context: Context, selection: Selection, rules: Sequence[LintRule] = RULES
) -> list[Diagnostic]:
    """Return the findings of `rules` in `document`, in the order of its lines."""
    document = embedded(document)
    lines, spans = LineIndex(document.text), placeholders(document)
    found = [
        _located(rule, one, document, lines)
        for rule in selection.choose(_that_apply(document, rules), document)
        for one in without_placeholders(document, spans, rule.code, _check(rule, document, context))
    ]
    return sorted(found, key=_in_order)


def shortened(found: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """Yield at most MAX_FINDINGS findings per rule of one file. The last one states how many more there are."""
    by_code: dict[str, list[Diagnostic]] = defaultdict(list)
    for one in found:
        by_code[one.code].append(one)
    for first, *others in (same[MAX_FINDINGS - 1 :] for same in by_code.values() if len(same) > MAX_FINDINGS):
        what = f"and {len(others) + 1} more findings of this rule"
        by_code[first.code][MAX_FINDINGS - 1 :] = [replace(first, message=what, place=replace(first.place, path=()))]
    yield from sorted((one for same in by_code.values() for one in same), key=_in_order)


def _in_order(one: Diagnostic) -> tuple[int, str]:
    return one.place.region.start, one.code


def _located(rule: LintRule, found: Diagnostic, document: Document, lines: LineIndex) -> Diagnostic:
    """Return `found` with its rule and its place in the text. A document that cannot be edited gets no fix."""
    fix = found.fix if document.fixable else None
    return replace(rule.attribute(found), place=document.locate(found.place, lines), fix=fix)


def _that_apply(document: Document, rules: Iterable[LintRule]) -> Iterator[LintRule]:
    """Return the rules that apply. If nothing could be read, these are only the ones about syntax."""
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
    """Return True if the place of a finding has been read. After a syntax error, a missing key may merely be unread."""
    return place.span is not None or (bool(place.path) and document.has(*place.path))
