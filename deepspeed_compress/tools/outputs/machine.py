"""Diagnostics for programs: JSON in the form of each tool, GitHub Actions commands, and SARIF."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from deepspeed_compress.diagnostics import Diagnostic, Edit, Fix, Severity
from deepspeed_compress.tools.outputs.report import Report, Rule, concise, full, lines, message, statistics, visible

Keys = Mapping[str, Callable[[Diagnostic], object]]
"""Keys of an object, with functions that return their values."""

LINT_KEYS: Keys = {
    "path": lambda one: one.place.file,
    "line": lambda one: one.place.start[0],
    "column": lambda one: one.place.start[1],
    "end_line": lambda one: one.place.end[0],
    "end_column": lambda one: one.place.end[1],
    "code": lambda one: one.code,
    "name": lambda one: one.name,
    "severity": lambda one: one.severity,
    "pointer": lambda one: one.pointer,
    "message": lambda one: one.message,
    "advice": lambda one: one.remedy,
    "fix": lambda one: one.fix and {"title": one.fix.title, "edits": [_edit(edit) for edit in one.fix.edits]},
}
"""Keys of the linter's JSON, described in docs/lint.md."""
DOCTOR_SEVERITIES: Mapping[Severity, str] = {"error": "critical", "warning": "serious", "info": "notice"}
DOCTOR_KEYS: Keys = {
    "name": lambda one: one.name,
    "severity": lambda one: DOCTOR_SEVERITIES[one.severity],
    "symptom": lambda one: f"{one.message}.",
    "evidence": lambda one: dict(one.evidence),
    "steps": lambda one: list(one.place.steps or ()),
    "remedy": lambda one: one.remedy,
    "patch": lambda one: one.patch,
    "page": lambda one: page(one),
}
"""Keys of the doctor's JSON, described in docs/doctor.md."""


def page(diagnostic: Diagnostic) -> str:
    """Return the page that explains a finding of the doctor."""
    return f"docs/doctor.md#{diagnostic.name}"


def objects(diagnostics: Iterable[Diagnostic], keys: Keys) -> list[dict[str, object]]:
    """Return each diagnostic as an object with `keys`."""
    return [{key: value(diagnostic) for key, value in keys.items()} for diagnostic in diagnostics]


def to_json(value: object) -> str:
    """Return `value` as JSON. NaN and infinity, which JSON does not have, are replaced by their names."""
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_finite(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def json_array(report: Report) -> str:
    """Return an array of objects in the linter's form."""
    return to_json(objects(report.diagnostics, LINT_KEYS))


def _edit(edit: Edit) -> dict[str, object]:
    return {"start": edit.span.start, "end": edit.span.end, "text": edit.text}


_GITHUB_LEVELS: Mapping[Severity, str] = {"error": "error", "warning": "warning", "info": "notice"}
_IN_TEXT = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_IN_PROPERTY = {**_IN_TEXT, ":": "%3A", ",": "%2C"}


def github(report: Report) -> str:
    """Return commands from which GitHub Actions creates annotations of a pull request."""
    return lines(_command(diagnostic) for diagnostic in report.diagnostics)


def _command(one: Diagnostic) -> str:
    (line, column), (end_line, end_column) = one.place.start, one.place.end
    properties: dict[str, object] = {"file": one.place.file, "line": line}
    # GitHub accepts columns only if the place is on a single line.
    properties |= {"col": column, "endColumn": end_column} if line == end_line else {"endLine": end_line}
    properties["title"] = f"{one.code} {one.name}"
    written = ",".join(f"{key}={_escape(str(value), _IN_PROPERTY)}" for key, value in properties.items())
    return f"::{_GITHUB_LEVELS[one.severity]} {written}::{_escape(_text(one), _IN_TEXT)}"


def _text(one: Diagnostic) -> str:
    return f"{message(one)}. {one.remedy}"


def _escape(text: str, table: Mapping[str, str]) -> str:
    return visible("".join(table.get(char, char) for char in text))


_SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_SARIF_LEVELS: Mapping[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}


def sarif(report: Report) -> str:
    """Return SARIF 2.1.0, the format of code scanning: the log of one run, with the rules that found something."""
    codes = list(dict.fromkeys(diagnostic.code for diagnostic in report.diagnostics))
    rules = {rule.code: rule for rule in report.rules}
    run = {
        "tool": {"driver": {"name": "ds-compress lint", "rules": [_rule(rules[code]) for code in codes]}},
        "columnKind": "unicodeCodePoints",
        "results": [_result(diagnostic, codes.index(diagnostic.code)) for diagnostic in report.diagnostics],
    }
    return json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.reason},
        "defaultConfiguration": {"level": _SARIF_LEVELS[rule.severity or "error"]},
        "properties": {"tags": [rule.family]},
    }


def _result(one: Diagnostic, rule: int) -> dict[str, Any]:
    # The bytes of a path need not be UTF-8.
    quoted = quote(one.place.file.encode("utf-8", "surrogateescape"))
    artifact = {"uri": f"file://{quoted}" if quoted.startswith("/") else quoted}
    (line, column), (end_line, end_column) = one.place.start, one.place.end
    region = {"startLine": line, "startColumn": column, "endLine": end_line, "endColumn": end_column}
    result = {
        "ruleId": one.code,
        "ruleIndex": rule,
        "level": _SARIF_LEVELS[one.severity],
        "message": {"text": _text(one)},
        "locations": [{"physicalLocation": {"artifactLocation": artifact, "region": region}}],
    }
    return result if one.fix is None else {**result, "fixes": [_sarif_fix(one.fix, artifact)]}


def _sarif_fix(fix: Fix, artifact: dict[str, str]) -> dict[str, Any]:
    change = {"artifactLocation": artifact, "replacements": [_replacement(edit) for edit in fix.edits]}
    return {"description": {"text": fix.title}, "artifactChanges": [change]}


def _replacement(edit: Edit) -> dict[str, Any]:
    region = {"charOffset": edit.span.start, "charLength": edit.span.end - edit.span.start}
    return {"deletedRegion": region, "insertedContent": {"text": edit.text}}


FORMATS: Mapping[str, Callable[[Report], str]] = {
    "full": full,
    "concise": concise,
    "statistics": statistics,
    "json": json_array,
    "github": github,
    "sarif": sarif,
}
"""Formats of a report, for people at a terminal and for programs."""
