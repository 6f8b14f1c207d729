"""One line a finding: `path:line:column: DSC123 name: what is wrong (at /pointer)`."""

from deepspeed_compress.tools.lint.finding import Finding
from deepspeed_compress.tools.lint.outputs.colour import BOLD, CODE, paint, visible
from deepspeed_compress.tools.lint.outputs.report import Report, lines


def render(report: Report) -> str:
    """The findings, and a summary."""
    return lines((*(headline(finding, report.colour) for finding in report.findings), *report.closing))


def headline(finding: Finding, colour: bool) -> str:
    """The line that says all but what to write instead."""
    line, column = finding.start
    place = paint(f"{visible(finding.document.path)}:{line}:{column}:", BOLD, colour)
    rule = paint(f"{finding.rule.code} {finding.rule.name}:", CODE[finding.rule.severity], colour)
    return f"{place} {rule} {visible(finding.message)}"
