"""Reader of HJSON that behaves like hjson 3.1, which DeepSpeed uses, but keeps places and continues after errors.

A file that hjson refuses has a problem here. A file that hjson reads has none, and the same value; a test compares the
two on generated texts. Limits on depth and on the number of parts, far above any configuration, bound time and memory.
"""

import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from deepspeed_compress.diagnostics import Diagnostic, Span, at, write
from deepspeed_compress.tools.lint.document import UNQUOTED, Document, Extension, Kind, Member, Node, object_node
from deepspeed_compress.tools.lint.values import ScanError, match, multi_line, quoted, to_json

MAX_DEPTH = 100
MAX_PARTS = 20_000
MAX_PROBLEMS = 100
MAX_INTEGER = 2**63 - 1

_SPACE = re.compile(r"[ \t\n\r]+")
_COMMENT = re.compile(r"#[^\n\r]*|//[^\n\r]*|/\*.*?\*/", re.DOTALL)
_UNQUOTED_KEY = re.compile(r"([^:{}\[\], \t\n\r]+)([ \t\n\r]*):")
_LITERAL = re.compile(
    r"(?:(null|true|false)[^\S\n\r]*|(-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?)[ \t]*)(?=[,}\]#\n\r]|//|/\*|\Z)"
)
_LINE = re.compile(r"[^\n\r]*")
_TO_NEXT = re.compile(r"[^,}\]\n]*")
_WORD = re.compile(r"[^\s,:{}\[\]]{0,40}")
_WORDS: dict[str, tuple[Kind, Any]] = {"null": ("null", None), "true": ("bool", True), "false": ("bool", False)}

Item = TypeVar("Item")


def parse(text: str, path: str = "") -> Document:
    """Read HJSON as DeepSpeed does, but continue after errors. Never raises."""
    scanner = _Scanner(text)
    root = scanner.document()
    return Document(path, text, root, tuple(scanner.problems), tuple(scanner.extensions))


class _Scanner:
    def __init__(self, text: str, at: int = 0) -> None:
        self.text = text
        self.at = at
        self.parts = 0
        self.stopped = False
        self.line_start = 0
        self.searched = 0  # end of the range searched for `line_start`
        self.closers: list[str] = []  # closing brackets of what is open, outermost first
        self.problems: list[Diagnostic] = []
        self.extensions: list[Extension] = []

    def peek(self) -> str:
        """Return the next character, or an empty string at the end."""
        return self.text[self.at : self.at + 1]

    def here(self) -> Span:
        return Span(self.at, min(self.at + 1, len(self.text)))

    def note(self, span: Span, what: str, instead: str) -> None:
        if self.stopped:
            return
        self.problems.append(Diagnostic(at(span=span), what, write(instead)))
        if len(self.problems) == MAX_PROBLEMS - 1:
            self.stop("more syntax errors")

    def stop(self, what: str) -> None:
        """Stop reading because of `what`. Everything that is open ends here."""
        self.problems.append(Diagnostic(at(span=self.here()), what, write("a configuration of DeepSpeed")))
        self.stopped, self.text = True, self.text[: self.at]
        self.closers.clear()

    def count(self) -> None:
        """Count another part, and stop reading if there are too many."""
        self.parts += 1
        if self.parts > MAX_PARTS and not self.stopped:
            self.stop(f"more than {MAX_PARTS} values and comments")

    def extend(self, kind: str, span: Span) -> None:
        self.extensions.append(Extension(kind, span))
        self.count()

    def gap(self) -> None:
        """Skip white space and comments."""
        while True:
            if space := _SPACE.match(self.text, self.at):
                self.at = space.end()
            if not (comment := _COMMENT.match(self.text, self.at)):
                break
            self.extend("a comment", Span(*comment.span()))
            self.at = comment.end()
        if self.text.startswith("/*", self.at):
            start, self.at = self.at, len(self.text)
            self.note(Span(start, start + 2), "this comment has no end", '"*/" behind it')

    # The outermost value

    def document(self) -> Node | None:
        if self.text.startswith("\ufeff"):
            self.extend("a byte order mark", Span(0, 1))
            self.at = 1
        self.gap()
        root = self.nothing() if not self.peek() else self.value() if self.peek() in "{[" else self.bare()
        self.gap()
        if self.peek():
            self.note(self.here(), "text behind the end of the configuration", "nothing: remove it")
        return root

    def nothing(self) -> Node | None:
        """Read an empty file, which hjson accepts as an empty object, though not after a byte order mark."""
        self.extend("no braces around the settings", Span(0, 0))
        if self.text.startswith("\ufeff"):
            self.note(Span(0, 0), "there is nothing in this file", "a configuration, such as {}")
        return object_node([], Span(0, 0))

    def bare(self) -> Node | None:
        """Read keys without the outermost braces."""
        start, members = self.at, list[Member]()
        while self.peek():
            self.element(self.pair, members)
        if not members:
            # If the text is not a configuration at all, one error is enough.
            del self.problems[1:]
        self.extend("no braces around the settings", Span(start, start))
        return object_node(members, Span(start, self.at))

    # Objects and arrays

    def value(self) -> Node:
        self.count()
        char = self.peek()
        if char in ("{", "["):
            return self.nested(char)
        return self.string() if char in ('"', "'") else self.unquoted()

    def nested(self, opener: str) -> Node:
        start = self.at
        if len(self.closers) == MAX_DEPTH:
            self.stop(f"nested more than {MAX_DEPTH} deep")
        if opener == "{":
            members = self.inside("}", self.pair)
            return object_node(members, Span(start, self.at))
        items = self.inside("]", self.value)
        return Node("array", [item.value for item in items], Span(start, self.at), items=tuple(items))

    def inside(self, closer: str, read: Callable[[], Item]) -> list[Item]:
        opening, found = self.here(), list[Item]()
        self.at += 1
        self.gap()
        self.closers.append(closer)
        while not self.ends(closer, opening):
            self.element(read, found)
        return found

    def element(self, read: Callable[[], Item], found: list[Item]) -> None:
        """Read one pair or value and the comma after it. After an error, skip to the next comma or line."""
        before = self.at
        try:
            found.append(read())
            self.separator(self.at)
        except ScanError as error:
            self.recover(error)
            self.gap()
            self.at += self.peek() == "," or self.at == before
            self.gap()

    def recover(self, error: ScanError) -> None:
        self.at = match(_TO_NEXT, self.text, error.resume).end()
        self.note(error.span, error.message, error.instead)

    def separator(self, end: int) -> None:
        """Read the comma that may follow a value that ended at `end`."""
        self.gap()
        comma = self.here()
        if self.peek() == ",":
            self.at += 1
            self.gap()
            if self.peek() in ("}", "]", ""):
                self.extend("a trailing comma", comma)
        elif self.peek() not in ("}", "]", ""):
            self.extend("a missing comma", Span(end, end))

    def ends(self, closer: str, opening: Span) -> bool:
        """Return True if the object or array is closed here, either properly or by an error."""
        while (char := self.peek()) in ("}", "]") and char not in self.closers:
            self.note(self.here(), f'"{char}" closes nothing', "nothing: remove it")
            self.at += 1
            self.gap()
        if char and char not in ("}", "]"):
            return False
        if self.closers:
            self.closers.pop()
        if char == closer:
            self.at += 1
        elif not self.stopped:
            opener = self.text[opening.start : opening.end]
            self.note(opening, f'"{opener}" is not closed', f'"{closer}" where it ends')
        return True

    def pair(self) -> Member:
        key, span = self.key()
        self.gap()
        if self.peek() != ":":
            raise self.error(f'no ":" behind the key {to_json(key)}', f"{to_json(key)}: and its value")
        self.at += 1
        self.gap()
        return Member(key, span, self.value())

    def error(self, message: str, instead: str) -> ScanError:
        return ScanError(self.here(), message, instead, self.at)

    # Keys, strings, numbers

    def key(self) -> tuple[str, Span]:
        start = self.at
        if self.peek() in ('"', "'"):
            return self.quoted()
        found = _UNQUOTED_KEY.match(self.text, self.at)
        if found is None:
            raise self.error(f"{self.found()} where a key should be", 'a key in double quotes and ":"')
        self.at = found.end() - 1
        key, span = found[1].rstrip() if found[2] else found[1], Span(start, found.end(1))
        self.extend("an unquoted key", span)
        return key, span

    def found(self) -> str:
        return to_json(match(_WORD, self.text, self.at)[0] or self.peek()) if self.peek() else "the end of the file"

    def quoted(self) -> tuple[str, Span]:
        start = self.at
        value, self.at, is_json = quoted(self.text, start)
        span = Span(start, self.at)
        if self.text[start] == "'":
            self.extend("a string in single quotes", span)
        elif not is_json:
            self.extend("an escape sequence", span)
        return value, span

    def string(self) -> Node:
        if not self.text.startswith("'''", self.at):
            value, span = self.quoted()
            return Node("string", value, span)
        start = self.at
        value, self.at = multi_line(self.text, start, self.indentation())
        self.extend("a string in triple quotes", Span(start, self.at))
        return Node("string", value, Span(start, self.at))

    def indentation(self) -> int | None:
        """Return the number of characters before this one on its line, or None on the only line of the text.

        For the first line, hjson regards the last line break of the text as the preceding one.
        """
        found = self.text.rfind("\n", self.searched, self.at)
        self.line_start = found + 1 if found >= 0 else self.line_start
        self.searched = self.at
        if self.line_start:
            return self.at - self.line_start
        last = self.text.rfind("\n", self.at)
        return None if last < 0 else self.at + len(self.text) - last - 1

    def unquoted(self) -> Node:
        """Read a literal if punctuation follows it, otherwise a string to the end of the line with all punctuation."""
        if literal := _LITERAL.match(self.text, self.at):
            return self.literal(literal)
        if self.peek() in ("{", "}", "[", "]", ",", ":", ""):
            raise self.error(f"{self.found()} where a value should be", "a value")
        line = match(_LINE, self.text, self.at)
        value = line[0].strip()
        start = self.at + len(line[0]) - len(line[0].lstrip())
        span, self.at = Span(start, start + len(value)), line.end()
        self.extend(UNQUOTED, span)
        return Node("string", value, span)

    def literal(self, found: re.Match[str]) -> Node:
        word, number = found[1], found[2]
        source = word or number
        span = Span(self.at, self.at + len(source))
        node = Node(*_WORDS[word], span) if word else Node("number", self.number(found, span), span)
        self.at = span.end
        if not source.isascii() or found[0][len(source) :].strip(" \t"):
            self.at = found.end()
            self.extend(UNQUOTED, Span(*found.span()))
        return node

    def number(self, found: re.Match[str], span: Span) -> int | float:
        """Return the number as hjson does: a whole number below 1e10 becomes an integer, and infinity is an error."""
        source = found[2]
        value: int | float
        if found[3] or found[4]:
            value = float(source)
            largest: int | float = sys.float_info.max
            value = int(value) if abs(value) < 1e10 and value.is_integer() else value
        else:
            largest = MAX_INTEGER
            value = int(source) if len(source) <= 20 else largest + 1
        if abs(value) <= largest:
            return value
        self.note(span, f"{source[:40]} is too large a number (allowed: up to {largest})", "a smaller one")
        return -largest if source.startswith("-") else largest
