"""Applies rules to a document."""

from collections.abc import Iterable, Iterator, Sequence

from deepspeed_compress.errors import CompressError
from deepspeed_compress.tools.lint.document import Document, parse
from deepspeed_compress.tools.lint.embedded import embedded
from deepspeed_compress.tools.lint.finding import Finding
from deepspeed_compress.tools.lint.hit import Hit
from deepspeed_compress.tools.lint.placeholders import without_placeholders
from deepspeed_compress.tools.lint.rule import Context, Rule
from deepspeed_compress.tools.lint.rules import RULES
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
) -> list[Finding]:
    """What the rules find in a configuration, in the order of its lines."""
    return lint_document(parse(text, path), context or Context(), selection or Selection())


def lint_document(
    document: Document, context: Context, selection: Selection, rules: Sequence[Rule] = RULES
) -> list[Finding]:
    """What `rules` find in `document`, in the order of its lines."""
    document = embedded(document)
    found = [
        Finding(rule, hit, document)
        for rule in selection.choose(_that_apply(document, rules), document)
        for hit in without_placeholders(document, rule.code, _hits(rule, document, context))
    ]
    return sorted(found, key=lambda finding: (finding.span.start, finding.rule.code))


def _that_apply(document: Document, rules: Iterable[Rule]) -> Iterator[Rule]:
    """Where nothing could be read, only the syntax can be spoken of."""
    return (rule for rule in rules if document.readable or rule.code.startswith(_ALWAYS))


def _hits(rule: Rule, document: Document, context: Context) -> list[Hit]:
    try:
        hits = list(rule.check(document, context))
    except Exception as error:
        raise RuleError(
            f"{document.path}: rule {rule.code} {rule.name} failed ({type(error).__name__}: {error}). "
            f"Write --ignore {rule.code} to go on without it, and report the file that it failed on."
        ) from error
    # Behind a syntax error, what seems to be missing may only be unread.
    return [
        hit for hit in hits if not document.problems or hit.span is not None or (hit.path and document.has(*hit.path))
    ]
