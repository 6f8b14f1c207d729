"""Each finding with its line, a caret under the place, and what to write instead."""

from deepspeed_compress.tools.lint.finding import Finding
from deepspeed_compress.tools.lint.outputs.as_concise import headline
from deepspeed_compress.tools.lint.outputs.colour import BLUE, CODE, blank, paint, visible
from deepspeed_compress.tools.lint.outputs.report import Report, lines

_BEFORE, _WIDTH = 60, 120
"""Of longer lines, so much is shown before the place, and in all."""


def render(report: Report) -> str:
    """The findings, and a summary."""
    return "".join(f"{_block(finding, report.colour)}\n" for finding in report.findings) + lines(report.closing)


def _block(finding: Finding, colour: bool) -> str:
    line, _ = finding.start
    number, gutter = paint(f"{line:>4} |", BLUE, colour), paint("     |", BLUE, colour)
    source, caret = _source(finding)
    advice = f"{visible(finding.advice)}{f' ({finding.fixable} does it)' if finding.fixable else ''}"
    shown = (
        ()
        if not source.strip()
        else (
            f"{number} {source}",
            f"{gutter} {paint(caret, CODE[finding.rule.severity], colour)}",
        )
    )
    return lines((headline(finding, colour), *shown, f"{paint('     =', BLUE, colour)} {advice}"))


def _source(finding: Finding) -> tuple[str, str]:
    """The line of the finding, and a line with carets under the place."""
    text, span = finding.document.text, finding.span
    start = text.rfind("\n", 0, span.start) + 1
    end = text.find("\n", span.start)
    end = len(text) if end < 0 else end
    first = max(start, span.start - _BEFORE) if end - start > _WIDTH else start
    last = min(end, first + _WIDTH)
    carets = "^" * max(1, min(span.end, last) - span.start)
    before = visible(text[first : span.start])
    return visible(text[first:last].rstrip("\r")), blank(before) + carets
