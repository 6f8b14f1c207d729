"""Edits that fixes are made of. They change a key or value and leave everything around it as the user wrote it.

A function that cannot do its work without touching more, such as text behind an unquoted string, returns no edits;
`fix` then makes no fix of it.
"""

import re
from itertools import pairwise

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.hit import Edit, Fix, Path, Span
from deepspeed_compress.tools.lint.nodes import Member, Node
from deepspeed_compress.tools.lint.strings import match, to_json

Edits = tuple[Edit, ...]

_COMMA = re.compile(r"(?>[ \t\n\r]|#[^\n\r]*|//[^\n\r]*|/\*(?s:.*?)\*/)*+,")
_BLANK = re.compile(r"[ \t\r]*")
_ENDS = re.compile(r"[ \t]*([,}\]#\n\r]|//|/\*|\Z)")
_INDENT = re.compile(r"[ \t]*")


def fix(title: str, *edits: Edits, safe: bool = True) -> Fix | None:
    """A fix of all the edits together; None when one of the parts is empty, or two are at the same place."""
    together = sorted((edit for part in edits for edit in part), key=lambda edit: (edit.span.start, edit.span.end))
    apart = all(one.span.end <= other.span.start for one, other in pairwise(together))
    return Fix(title, tuple(together), safe) if all(edits) and apart else None


def replace(document: Document, path: Path, value: object) -> Edits:
    """Put `value` at `path`."""
    node = document.node(*path)
    if node is None:
        return ()
    # HJSON lets the comma out behind quotes and brackets; numbers and words without it would be of a longer string.
    bare = not isinstance(value, str | list | dict) and not _ENDS.match(document.text, node.span.end)
    return (Edit(node.span, to_json(value) + ("," if bare else "")),)


def rename(document: Document, path: Path, key: str) -> Edits:
    """Give the key at `path` another name."""
    member = document.member(*path)
    return () if member is None else (Edit(member.key_span, to_json(key)),)


def remove(document: Document, path: Path, member: Member | None = None) -> Edits:
    """Remove the key at `path` with its value and comma, or `member`, one of several equal keys there."""
    holder, member = document.node(*path[:-1]), member or document.member(*path)
    if holder is None or member is None:
        return ()
    index = next((index for index, other in enumerate(holder.members) if other is member), None)
    if index is None:
        return ()
    before = holder.members[index - 1] if index else None
    comma = _comma(document.text, member.value.span.end)
    if before is not None and index + 1 == len(holder.members) and not comma:
        return _remove_last(document.text, before, member)
    if comma and document.text[member.value.span.end : comma].strip() == ",":
        return (_whole_lines(document.text, member.key_span.start, comma),)
    behind = (Edit(Span(comma - 1, comma), ""),) if comma else ()
    return (_whole_lines(document.text, member.key_span.start, member.value.span.end), *behind)


def add(document: Document, path: Path, key: str, value: object) -> Edits:
    """Add a key to the object at `path`, behind its last one; objects that are missing are added too."""
    node = document.node(*path)
    if node is None:
        return add(document, path[:-1], str(path[-1]), {key: value}) if path else ()
    return _append(document.text, node, f"{to_json(key)}: {to_json(value)}") if node.kind == "object" else ()


def move(document: Document, path: Path, to: Path) -> Edits:
    """Move the value at `path` to the key `to`, which must not exist."""
    member, depth = document.member(*path), len(path) - 1
    if member is None or document.has(*to):
        return ()
    if to[:depth] == path[:-1] and not document.has(*to[: depth + 1]):
        return _wrap(document.text, member, to[depth:])
    removed, added = remove(document, path), add(document, to[:-1], str(to[-1]), document.get(*path))
    return (*removed, *added) if removed and added else ()


def _wrap(text: str, member: Member, keys: Path) -> Edits:
    """Put a value into new objects, where it is: its last new key is inside the others."""
    *outer, last = (to_json(str(key)) for key in keys)
    renamed = Edit(member.key_span, "".join(f"{key}: {{" for key in outer) + last)
    if not outer:
        return (renamed,)
    end = member.value.span.end
    return () if unquoted(text, member.value) else (renamed, Edit(Span(end, end), "}" * len(outer)))


def _comma(text: str, end: int) -> int | None:
    """The end of the comma behind a value, if nothing but space and comments is before it."""
    comma = _COMMA.match(text, end)
    return comma.end() if comma else None


def _whole_lines(text: str, start: int, end: int) -> Edit:
    """Remove `start` to `end`, with the line break when nothing else is on these lines."""
    line_start = text.rfind("\n", 0, start) + 1
    line_end = match(_BLANK, text, end).end()
    if text[line_start:start].strip(" \t\r\ufeff") == "" and text[line_end : line_end + 1] == "\n" and line_start:
        return Edit(Span(line_start, line_end + 1), "")
    same_line = match(_INDENT, text, end).end()
    return Edit(Span(start, end if text[same_line : same_line + 1] in ("\n", "\r", "") else same_line), "")


def _remove_last(text: str, before: Member, member: Member) -> Edits:
    """Remove the last key, and the comma in front of it, which JSON forbids to stay."""
    start, end = before.value.span.end, member.value.span.end
    if unquoted(text, before.value):
        return (_whole_lines(text, member.key_span.start, end),)
    if text[start : member.key_span.start].strip() in (",", ""):
        return (Edit(Span(start, end), ""),)
    comma = _comma(text, start)
    ahead = (Edit(Span(comma - 1, comma), ""),) if comma else ()
    return (*ahead, _whole_lines(text, member.key_span.start, end))


def _append(text: str, node: Node, pair: str) -> Edits:
    if not node.members:
        inside = text[node.span.start : node.span.start + 1] == "{"
        return (Edit(Span(node.span.start + 1, node.span.start + 1), pair),) if inside else ()
    last = node.members[-1]
    end = last.value.span.end
    line_start = text.rfind("\n", 0, last.key_span.start) + 1
    indent = text[line_start : last.key_span.start]
    if unquoted(text, last.value):
        return () if indent.strip() else (Edit(Span(end, end), f"\n{indent}{pair}"),)
    own_line = not indent.strip() and line_start > node.span.start
    return (Edit(Span(end, end), f",\n{indent}{pair}" if own_line else f", {pair}"),)


def unquoted(text: str, node: Node) -> bool:
    """Whether `node` is a string without quotes, which takes the rest of its line."""
    return node.kind == "string" and text[node.span.start] not in "\"'"
