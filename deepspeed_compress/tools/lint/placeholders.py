"""Placeholders in templates, which a script replaces by values before DeepSpeed reads the file."""

import re
from collections.abc import Iterator, Sequence
from functools import cache

from deepspeed_compress.diagnostics import Diagnostic, Span
from deepspeed_compress.tools.lint.document import Document, Member
from deepspeed_compress.tools.lint.fixes import touches, unquoted
from deepspeed_compress.tools.lint.keys import keys

TEMPLATE = "DSC006"

# The length is limited, because the search starts again at every brace.
_MARKED = re.compile(
    r"\{\{[^{}\n]{0,99}\}\}|\{%[^%\n]{0,99}%\}|\$\{[^{}\n]{0,99}\}|\$[A-Za-z_]\w*"
    r"|<[A-Za-z_][\w -]{0,99}>|@[A-Z_]{1,99}@|%\([A-Za-z_]\w{0,99}\)[sdf]"
    r"|(?:(?<=[:\[,])|(?<=[:\[,] ))\{[A-Za-z_]\w{0,99}\}"
)
_NEAR = 1000
"""Characters of a long line to search around an error."""
_NAMED = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_BARE = re.compile(r"[A-Z][A-Z0-9_]{2,}|[A-Z]\w*_\w+")
_WORDS = frozenset({"TRUE", "FALSE", "NULL", "NONE", "NAN", "AUTO"})


def placeholders(document: Document) -> list[Span]:
    """Return the placeholders in `document`: STAGE without quotes, "ZERO_STAGE", ${stage}, {{ stage }} or <stage>."""
    return sorted({*_values(document), *_unread(document)}, key=lambda span: (span.start, span.end))


def without_placeholders(
    document: Document, spans: Sequence[Span], code: str, found: list[Diagnostic]
) -> list[Diagnostic]:
    """Return the findings of the rule `code`, without those that regard a placeholder in `spans` as a value.

    Returns nothing if placeholders may be the cause of syntax errors, because without quotes they extend to the end of
    their line.
    """
    if not spans or code == TEMPLATE:
        return found
    return [] if document.problems else [one for one in found if not touches(document.span_of(one.place), spans)]


def shown(document: Document, span: Span) -> str:
    """Return the placeholder at `span`, without other text that an unquoted one extends over."""
    line = document.text[span.start : span.start + _NEAR].split("\n", 1)[0]
    marked = _MARKED.search(line)
    return marked[0] if marked else document.text[span.start : span.end].strip(' ,"')


def _values(document: Document) -> Iterator[Span]:
    for _, member in document.walk():
        if member.value.kind == "string" and _stands_for_another(document, member):
            yield member.value.span


def _stands_for_another(document: Document, member: Member) -> bool:
    text = member.value.value.strip().removesuffix(",")
    bare = unquoted(document.text, member.value)
    if (_MARKED.match if bare else _MARKED.fullmatch)(text):
        return True
    named = (_BARE if bare else _NAMED).fullmatch(text)
    return named is not None and text not in _WORDS and member.key not in _texts()


@cache
def _texts() -> frozenset[str]:
    """Return the keys whose values may be arbitrary text."""
    known = [item for section in keys().sections.values() for item in section.keys.items()]
    return frozenset(name for name, key in known if not key.kinds or "string" in key.kinds)


def _unread(document: Document) -> Iterator[Span]:
    """Yield the placeholders that are syntax errors."""
    for problem in document.problems:
        span = document.span_of(problem.place)
        before, behind = max(span.start - _NEAR, 0), min(span.start + _NEAR, len(document.text))
        line_start = max(document.text.rfind("\n", before, span.start) + 1, before)
        line_end = document.text.find("\n", span.start, behind)
        if _MARKED.search(document.text, line_start, line_end if line_end >= 0 else behind):
            yield span
