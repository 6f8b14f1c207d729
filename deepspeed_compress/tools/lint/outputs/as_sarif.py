"""SARIF 2.1.0, the format of code scanning."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from deepspeed_compress.tools.lint.finding import Finding
from deepspeed_compress.tools.lint.hit import Edit, Fix
from deepspeed_compress.tools.lint.outputs.report import Report
from deepspeed_compress.tools.lint.rule import Rule

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS: Mapping[str, str] = {"error": "error", "warning": "warning", "info": "note"}


def render(report: Report) -> str:
    """A log of one run, with the rules that found something."""
    rules = list({finding.rule.code: finding.rule for finding in report.findings}.values())
    codes = [rule.code for rule in rules]
    driver = {"name": "ds-compress lint", "rules": [_rule(rule) for rule in rules]}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, codes.index(finding.rule.code)) for finding in report.findings],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.rationale},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"tags": [rule.family]},
    }


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    artifact = {"uri": _uri(finding.document.path)}
    place = {"physicalLocation": {"artifactLocation": artifact, "region": _region(finding)}}
    result = {
        "ruleId": finding.rule.code,
        "ruleIndex": rule,
        "level": _LEVELS[finding.rule.severity],
        "message": {"text": f"{finding.message}. {finding.advice}"},
        "locations": [place],
    }
    fix = finding.hit.fix
    return result if fix is None or not finding.fixable else {**result, "fixes": [_fix(fix, artifact)]}


def _region(finding: Finding) -> dict[str, int]:
    (line, column), (end_line, end_column) = finding.start, finding.end
    return {"startLine": line, "startColumn": column, "endLine": end_line, "endColumn": end_column}


def _fix(fix: Fix, artifact: dict[str, str]) -> dict[str, Any]:
    change = {"artifactLocation": artifact, "replacements": [_replacement(edit) for edit in fix.edits]}
    return {"description": {"text": fix.title}, "artifactChanges": [change]}


def _replacement(edit: Edit) -> dict[str, Any]:
    region = {"charOffset": edit.span.start, "charLength": edit.span.end - edit.span.start}
    return {"deletedRegion": region, "insertedContent": {"text": edit.text}}


def _uri(path: str) -> str:
    """A path as a relative or absolute URI."""
    return f"file://{quote(path)}" if path.startswith("/") else quote(path)
