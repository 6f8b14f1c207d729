"""Contents of the report on one run of the linter or the doctor, and the texts of their rules.

A module of rules decorates its checks, which turns them into rules:

    @rule("DSC401", "warning")
    def zero_without_stage(document: Document, context: Context) -> Findings: ...
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deepspeed_compress.diagnostics import SEVERITIES, Diagnostic, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Texts of a rule. The linter and the doctor each add the fields they need, and the check."""

    code: str
    name: str
    """Words joined by hyphens."""
    severity: Severity | None
    """Severity, or None if each diagnostic states its own."""
    summary: str
    """Summary in one line."""
    reason: str = ""
    """Reason why the rule matters."""
    family: str = ""

    def attribute(self, diagnostic: Diagnostic) -> Diagnostic:
        """Return `diagnostic` with the code, name and severity of this rule."""
        severity = self.severity or diagnostic.severity
        return replace(diagnostic, code=self.code, name=self.name, severity=severity)


@dataclass(frozen=True, slots=True)
class Report:
    """Diagnostics of all files, with further data for outputs."""

    diagnostics: tuple[Diagnostic, ...]
    files: int
    rules: tuple[Rule, ...] = ()
    """All rules that were applied."""
    fixed: int = 0
    colour: bool = False

    @property
    def summary(self) -> str:
        """Return the last line for people."""
        fixed = f"Fixed {plural(self.fixed, 'finding')}. " if self.fixed else ""
        if not self.diagnostics:
            return f"{fixed}{plural(self.files, 'file')} checked, nothing found."
        kinds = [
            plural(count, kind) if kind != "info" else f"{count} info"
            for kind in SEVERITIES
            if (count := sum(diagnostic.severity == kind for diagnostic in self.diagnostics))
        ]
        found = f"{plural(len(self.diagnostics), 'finding')} in {plural(self.files, 'file')}: {', '.join(kinds)}."
        corrected = sum(diagnostic.fix is not None for diagnostic in self.diagnostics)
        return fixed + found + (f" --fix corrects {corrected}." if corrected else "")


def message(diagnostic: Diagnostic) -> str:
    """Return what is wrong, and where in the configuration."""
    return f"{diagnostic.message} (at {diagnostic.pointer})" if diagnostic.place.path else diagnostic.message


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: `1 file`, `2 files`, `1,000 files`."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {noun}s"


def lines(texts: Iterable[str]) -> str:
    """Return the texts, each on a line of its own."""
    return "".join(f"{text}\n" for text in texts)


_BOLD, _BLUE = "1", "34"
_STYLES: Mapping[Severity, str] = {"error": "1;31", "warning": "1;33", "info": "1;36"}
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BEFORE, _WIDTH = 60, 120
"""Characters of a long line to show before the place, and in total."""


def concise(report: Report) -> str:
    """Return one line for each, `path:line:column: DSC123 name: what is wrong (at /pointer)`, and a summary."""
    return lines((*(_headline(diagnostic, report.colour) for diagnostic in report.diagnostics), report.summary))


def full(report: Report) -> str:
    """Return each with its line, a caret under the place and the remedy, and a summary."""
    return lines((*(_block(diagnostic, report.colour) for diagnostic in report.diagnostics), report.summary))


def statistics(report: Report) -> str:
    """Return the number of findings per rule, most frequent first, and a summary.

    A star marks rules for which `--fix` corrects some findings.
    """
    by_code: dict[str, list[Diagnostic]] = defaultdict(list)
    for diagnostic in report.diagnostics:
        by_code[diagnostic.code].append(diagnostic)
    ordered = sorted(by_code.values(), key=lambda found: (-len(found), found[0].code))
    return lines((*(_count(found, report.colour) for found in ordered), report.summary))


def _headline(one: Diagnostic, colour: bool) -> str:
    """Return everything except the remedy."""
    line, column = one.place.start
    place = _paint(f"{visible(one.place.file)}:{line}:{column}:", _BOLD, colour)
    rule = _paint(f"{one.code} {one.name}:", _STYLES[one.severity], colour)
    return f"{place} {rule} {visible(message(one))}"


def _block(one: Diagnostic, colour: bool) -> str:
    line, _ = one.place.start
    number, gutter = _paint(f"{line:>4} |", _BLUE, colour), _paint("     |", _BLUE, colour)
    source, caret = _source(one)
    shown = (f"{number} {source}", f"{gutter} {_paint(caret, _STYLES[one.severity], colour)}") if source.strip() else ()
    remedy = f"{visible(one.remedy)}{' (--fix does it)' if one.fix else ''}"
    return lines((_headline(one, colour), *shown, f"{_paint('     =', _BLUE, colour)} {remedy}"))


def _source(one: Diagnostic) -> tuple[str, str]:
    """Return the line of the place, and a line with carets under it."""
    text, span = one.place.text, one.place.region
    start, end = _line(text, span.start)
    first = max(start, span.start - _BEFORE) if end - start > _WIDTH else start
    last = min(end, first + _WIDTH)
    carets = "^" * max(1, min(span.end, last) - span.start)
    before = visible(text[first : span.start])
    return visible(text[first:last].rstrip("\r")), _blank(before) + carets


def _line(text: str, at: int) -> tuple[int, int]:
    """Return the start and end of the line around `at`. The line is not searched beyond what can be shown of it."""
    start, end = max(at - _WIDTH - 1, 0), min(at + _WIDTH + 1, len(text))
    before, behind = text.rfind("\n", start, at), text.find("\n", at, end)
    return before + 1 if before >= 0 else start, behind if behind >= 0 else end


def _count(found: Sequence[Diagnostic], colour: bool) -> str:
    one = found[0]
    star = "[*]" if any(each.fix for each in found) else "[ ]"
    return f"{len(found):>5}  {_paint(one.code, _STYLES[one.severity], colour)}  {star}  {one.severity:<7}  {one.name}"


def _paint(text: str, style: str, colour: bool) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if colour else text


def visible(text: str) -> str:
    """Return `text` on one line, without characters that move the cursor or change the direction of text."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def _blank(text: str) -> str:
    """Return white space as wide as `text`."""
    return "".join(
        "\t" if char == "\t" else "  " if unicodedata.east_asian_width(char) in "WF" else " " for char in text
    )


def printable(text: str) -> str:
    r"""Return `text` with every nonprintable character, such as ESC or a lone surrogate, as "\x1b" or "\ud800".

    Line breaks are replaced too. This keeps a file from moving the cursor, changing colors or breaking an encoder.
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
