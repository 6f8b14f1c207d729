"""Commands from which GitHub Actions makes annotations of a pull request."""

from collections.abc import Mapping

from deepspeed_compress.tools.lint.finding import Finding
from deepspeed_compress.tools.lint.outputs.report import Report, lines

_LEVELS: Mapping[str, str] = {"error": "error", "warning": "warning", "info": "notice"}
_IN_TEXT = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_IN_PROPERTY = {**_IN_TEXT, ":": "%3A", ",": "%2C"}


def render(report: Report) -> str:
    """One command a finding."""
    return lines(_command(finding) for finding in report.findings)


def _command(finding: Finding) -> str:
    (line, column), (end_line, end_column) = finding.start, finding.end
    properties: dict[str, object] = {"file": finding.document.path, "line": line}
    # GitHub takes columns only of findings on one line.
    properties |= {"col": column, "endColumn": end_column} if line == end_line else {"endLine": end_line}
    properties["title"] = f"{finding.rule.code} {finding.rule.name}"
    written = ",".join(f"{key}={_escape(str(value), _IN_PROPERTY)}" for key, value in properties.items())
    text = f"{finding.message}. {finding.advice}"
    return f"::{_LEVELS[finding.rule.severity]} {written}::{_escape(text, _IN_TEXT)}"


def _escape(text: str, table: Mapping[str, str]) -> str:
    return "".join(table.get(char, char) for char in text)
