"""Templates: configurations in which a program has still to fill in values."""

import re

from deepspeed_compress.lint.document import Document
from deepspeed_compress.lint.hit import Span
from deepspeed_compress.lint.nodes import Member

_MARK = (
    r"\{\{[^{}\n]{0,99}\}\}|\$\{[^{}\n]{0,99}\}|\$[A-Za-z_]\w{0,99}|%\([A-Za-z_]\w{0,99}\)[sdf]|<[A-Za-z][^<>\n]{0,99}>"
)
_QUOTED = re.compile(rf"[\"'](?:{_MARK})[\"']")
# Capitals need an underscore: "device": CPU is more likely a string that lost its quotes.
_BARE = re.compile(rf"({_MARK}|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)\s*(?:[,}}\]#]|//|$)")
# Where a brace opens inside a brace, or behind a colon around one word, HJSON has an error.
_BRACES = re.compile(r"\{\{[^{}\n]{0,99}\}\}|\{%[^%\n]{0,99}%\}|(?:(?<=[:\[,])|(?<=[:\[,] ))\{[A-Za-z_]\w{0,99}\}")


def placeholders(document: Document) -> list[Span]:
    """Where values are to be filled in: `ZERO_STAGE`, `$STAGE`, `${stage}`, `{{ stage }}`, `%(stage)d`, `<stage>`."""
    found = [_placeholder(document.text, member) for _, member in document.walk() if member.value.kind == "string"]
    errors = _BRACES.finditer(document.text) if document.problems else ()
    spans = {span for span in found if span is not None} | {Span(*match.span()) for match in errors}
    return sorted(spans, key=lambda span: span.start)


def _placeholder(text: str, member: Member) -> Span | None:
    """The place of the value, if it is a placeholder and nothing else."""
    span = member.value.span
    value = text[span.start : span.end]
    if _QUOTED.fullmatch(value):
        return span
    # Who leaves quotes away everywhere may do so around capitals too.
    bare = _BARE.match(value) if text[member.key_span.start] == '"' or not value[:1].isalpha() else None
    return None if bare is None else Span(span.start, span.start + bare.end(1))
