"""A JSON array of findings."""

import json
from typing import Any

from deepspeed_compress.tools.lint.finding import Finding
from deepspeed_compress.tools.lint.hit import Edit
from deepspeed_compress.tools.lint.outputs.report import Report


def render(report: Report) -> str:
    """The findings as objects."""
    return json.dumps([_finding(finding) for finding in report.findings], indent=2) + "\n"


def _finding(finding: Finding) -> dict[str, Any]:
    (line, column), (end_line, end_column) = finding.start, finding.end
    fix = finding.hit.fix if finding.fixable else None
    return {
        "path": finding.document.path,
        "line": line,
        "column": column,
        "end_line": end_line,
        "end_column": end_column,
        "code": finding.rule.code,
        "name": finding.rule.name,
        "severity": finding.rule.severity,
        "pointer": finding.pointer,
        "message": finding.hit.what,
        "advice": finding.advice,
        "fix": fix and {"title": fix.title, "safe": fix.safe, "edits": [_edit(edit) for edit in fix.edits]},
    }


def _edit(edit: Edit) -> dict[str, Any]:
    return {"start": edit.span.start, "end": edit.span.end, "text": edit.text}
