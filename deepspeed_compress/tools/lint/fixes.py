"""Fixes: the edits they consist of, and how they are applied.

An edit changes a key or value and leaves the text around it as the user wrote it. A function returns no edits if more
would have to change, such as text after an unquoted string; `fix` then returns None.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from deepspeed_compress.diagnostics import Diagnostic, Edit, Fix, Path, Span
from deepspeed_compress.tools.lint.document import Document, Member, Node
from deepspeed_compress.tools.lint.scanner import parse
from deepspeed_compress.tools.lint.values import match, to_json

MAX_FIXES = 200
"""Maximum number of fixes of a file. A fix may reveal another finding; more than this indicate a defect in a rule."""
Edits = tuple[Edit, ...]

_COMMA = re.compile(r"(?>[ \t\n\r]|#[^\n\r]*|//[^\n\r]*|/\*(?s:.*?)\*/)*+,")
_BLANK = re.compile(r"[ \t\r]*")
_ENDS = re.compile(r"[ \t]*([,}\]#\n\r]|//|/\*|\Z)")
_INDENT = re.compile(r"[ \t]*")
_BLANKS = (" ", "\t", "\r", "\ufeff")


def fix(title: str, *edits: Edits) -> Fix | None:
    """Return a fix that consists of all the edits, or None if one of the arguments is empty or two edits overlap."""
    together = sorted((edit for part in edits for edit in part), key=lambda edit: (edit.span.start, edit.span.end))
    apart = all(one.span.end <= other.span.start for one, other in pairwise(together))
    return Fix(title, tuple(together)) if all(edits) and apart else None


def replace(document: Document, path: Path, value: object) -> Edits:
    """Return the edits that replace the value at `path` by `value`. The values of a repeated key are not changed."""
    node = document.node(*path)
    if node is None or _is_repeated(document.node(*path[:-1]), path[-1]):
        return ()
    # HJSON allows a missing comma after quotes and brackets, but a number or word without one starts a longer string.
    bare = not isinstance(value, str | list | dict) and not _ENDS.match(document.text, node.span.end)
    return (Edit(node.span, to_json(value) + ("," if bare else "")),)


def _is_repeated(holder: Node | None, key: str | int) -> bool:
    if holder is None or len(holder.members) == len(holder.by_key):
        return False
    return sum(member.key == key for member in holder.members) > 1


def rename(document: Document, path: Path, key: str) -> Edits:
    """Return the edits that rename the key at `path`."""
    member = document.member(*path)
    return () if member is None else (Edit(member.key_span, to_json(key)),)


def remove(document: Document, path: Path, member: Member | None = None) -> Edits:
    """Return the edits that remove the key at `path` with its value and comma.

    If the key is repeated, `member` states which one to remove.
    """
    holder, member = document.node(*path[:-1]), member or document.member(*path)
    if holder is None or member is None:
        return ()
    index = bisect_left(holder.members, member.key_span.start, key=lambda other: other.key_span.start)
    if holder.members[index : index + 1] != (member,):
        return ()
    before = holder.members[index - 1] if index else None
    comma = _comma(document.text, member.value.span.end)
    if before is not None and index + 1 == len(holder.members) and not comma:
        return _remove_last(document.text, before, member)
    if comma and document.text[member.value.span.end : comma].strip() == ",":
        return (_whole_lines(document.text, member.key_span.start, comma),)
    behind = (Edit(Span(comma - 1, comma), ""),) if comma else ()
    return (_whole_lines(document.text, member.key_span.start, member.value.span.end), *behind)


def _comma(text: str, end: int) -> int | None:
    """Return the end of the comma after a value, if only space and comments precede the comma, else None."""
    comma = _COMMA.match(text, end)
    return comma.end() if comma else None


def _whole_lines(text: str, start: int, end: int) -> Edit:
    """Return an edit that removes `start` to `end`, with the line break if nothing else is on these lines."""
    line_start, line_end = _blank_before(text, start), match(_BLANK, text, end).end()
    if text[line_end : line_end + 1] == "\n" and text[line_start - 1 : line_start] == "\n":
        return Edit(Span(line_start, line_end + 1), "")
    same_line = match(_INDENT, text, end).end()
    return Edit(Span(start, end if text[same_line : same_line + 1] in ("\n", "\r", "") else same_line), "")


def _blank_before(text: str, end: int) -> int:
    """Return the start of the white space before `end` on its line."""
    while text[end - 1 : end] in _BLANKS:
        end -= 1
    return end


def _remove_last(text: str, before: Member, member: Member) -> Edits:
    """Return the edits that remove the last key and the comma before it, which JSON does not allow to remain."""
    start, end = before.value.span.end, member.value.span.end
    if unquoted(text, before.value):
        return (_whole_lines(text, member.key_span.start, end),)
    if text[start : member.key_span.start].strip() in (",", ""):
        return (Edit(Span(start, end), ""),)
    comma = _comma(text, start)
    ahead = (Edit(Span(comma - 1, comma), ""),) if comma else ()
    return (*ahead, _whole_lines(text, member.key_span.start, end))


def unquoted(text: str, node: Node) -> bool:
    """Return True if `node` is an unquoted string, which extends to the end of its line."""
    return node.kind == "string" and text[node.span.start] not in "\"'"


@dataclass(frozen=True, slots=True)
class Fixed:
    """Document after its fixes, the number of fixes, and the remaining findings."""

    document: Document
    count: int
    remaining: tuple[Diagnostic, ...]

    @property
    def text(self) -> str:
        return self.document.text


def apply(document: Document, lint: Callable[[Document], Iterable[Diagnostic]], most: int = MAX_FIXES) -> Fixed:
    """Apply up to `most` fixes one after the other, because each may change what is found and where."""
    count, remaining = 0, tuple(lint(document))
    while document.fixable and count < most:
        fixes = [one.fix for one in remaining if one.fix is not None]
        texts = (edited(document.text, one.edits) for one in fixes)
        changed = (parse(text, document.path) for text in texts if text != document.text)
        better = next((after for after in changed if _is_sound(document, after)), None)
        if better is None:
            break
        document, count, remaining = better, count + 1, tuple(lint(better))
    return Fixed(document, count, remaining)


def _is_sound(before: Document, after: Document) -> bool:
    """Return True if a change adds neither a syntax error nor a duplicate key.

    Two fixes may each be right, yet rename two keys to the same one if both are applied.
    """
    return len(after.problems) <= len(before.problems) and after.duplicates <= before.duplicates


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Return `text` after edits that do not overlap."""
    parts, at = list[str](), 0
    for edit in sorted(edits, key=lambda edit: (edit.span.start, edit.span.end)):
        parts += (text[at : edit.span.start], edit.text)
        at = edit.span.end
    return "".join((*parts, text[at:]))
