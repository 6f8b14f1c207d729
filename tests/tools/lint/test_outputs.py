"""Output of findings in each format."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import given

from deepspeed_compress.diagnostics import Edit, Span
from deepspeed_compress.tools.lint.fixes import edited
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import Selection, lint_document
from deepspeed_compress.tools.lint.scanner import parse
from deepspeed_compress.tools.outputs.machine import FORMATS
from deepspeed_compress.tools.outputs.report import Report
from tests.support.properties import properties
from tests.tools.lint.texts import CONFIGS, NOISE, TOYS, broken

CONFIG = """{
  "zero_optimization": {
\t"stage": 4
  },
  "amp": {"opt": "O1"},
  "名": "x
}
"""
SARIF = json.loads((Path(__file__).parent / "sarif-schema-2.1.0.json").read_text(encoding="utf-8"))
"""Schema by OASIS, without its white space."""


def report(text: str = CONFIG, path: str = "dir/ds config.json", rules: Any = TOYS, **more: Any) -> Report:
    findings = lint_document(parse(text, path), Context(framework="hf", world_size=4), Selection(), rules)
    return Report(tuple(findings), 1, tuple(rules), **more)


FULL = """dir/ds config.json:3:11: DSC401 stage-range: 4 is no stage (allowed: 0 to 3) (at /zero_optimization/stage)
   3 | \t"stage": 4
     | \t         ^
     = Write "stage": 3. (--fix does it)

dir/ds config.json:5:3: DSC101 removed-amp: amp was removed (at /amp)
   5 |   "amp": {"opt": "O1"},
     |   ^^^^^
     = Write nothing: remove the key. (--fix does it)

dir/ds config.json:6:8: DSC001 syntax-error: this string has no end on its line
   6 |   "名": "x
     |         ^^
     = Write a closing ".

3 findings in 1 file: 2 errors, 1 warning. --fix corrects 2.
"""


def test_full() -> None:
    assert FORMATS["full"](report()) == FULL


def test_concise() -> None:
    lines = FULL.splitlines()
    assert FORMATS["concise"](report()).splitlines() == [lines[0], lines[5], lines[10], lines[-1]]


def test_colours_change_no_text() -> None:
    for name in ("full", "concise"):
        coloured = FORMATS[name](report(colour=True))
        assert coloured != FORMATS[name](report())
        assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == FORMATS[name](report())


def test_summary() -> None:
    assert FORMATS["concise"](report("{train_batch_size: 1}")) == "1 file checked, nothing found.\n"
    assert FORMATS["concise"](Report((), 2, fixed=1)) == "Fixed 1 finding. 2 files checked, nothing found.\n"


def test_statistics() -> None:
    """Rules are sorted by frequency, then by code. A star marks findings that --fix corrects."""
    found = [finding for text in (CONFIG, "{amp: {}}", "{amp: 1}", "{") for finding in report(text).diagnostics]
    lines = FORMATS["statistics"](Report(tuple(reversed(found)), 4)).splitlines()
    assert lines[:3] == [
        "    3  DSC101  [*]  warning  removed-amp",
        "    2  DSC001  [ ]  error    syntax-error",
        "    2  DSC201  [ ]  error    batch-missing",
    ]
    assert lines[3] == "    1  DSC401  [*]  error    stage-range"
    assert lines[4:] == [Report(tuple(found), 4).summary]
    assert "\x1b[1;31mDSC401" in FORMATS["statistics"](Report(tuple(found), 4, colour=True))


def test_a_long_line_is_cut_around_the_place() -> None:
    text = '{"train_batch_size": "' + "b" * 500 + '", "zero_optimization": {"stage": 9}, "c": "' + "d" * 500 + '"}'
    source, caret = FORMATS["full"](report(text)).splitlines()[1:3]
    assert len(source) < 140
    assert source[caret.index("^")] == "9"


def test_a_terminal_cannot_be_controlled() -> None:
    text = '{"\\u001b[31m\\u202e": 1, "amp": {"\x7f\x9b": "\x1b]0;title\x07"}}'
    shown = FORMATS["full"](report(text, "\x1b.json"))
    assert not set("\x1b\x7f\x9b\x07\u202e") & set(shown)


def test_json() -> None:
    found = json.loads(FORMATS["json"](report()))
    assert [finding["code"] for finding in found] == ["DSC401", "DSC101", "DSC001"]
    assert found[0] == {
        "path": "dir/ds config.json",
        "line": 3,
        "column": 11,
        "end_line": 3,
        "end_column": 12,
        "code": "DSC401",
        "name": "stage-range",
        "severity": "error",
        "pointer": "/zero_optimization/stage",
        "message": "4 is no stage (allowed: 0 to 3)",
        "advice": 'Write "stage": 3.',
        "fix": {"title": "Use 3", "edits": [{"start": 37, "end": 38, "text": "3"}]},
    }
    assert found[2]["fix"] is None
    assert found[2]["pointer"] == ""


def test_github() -> None:
    lines = FORMATS["github"](report(path="a,b:c%.json")).splitlines()
    assert lines[1] == (
        "::warning file=a%2Cb%3Ac%25.json,line=5,col=3,endColumn=8,title=DSC101 removed-amp"
        "::amp was removed (at /amp). Write nothing: remove the key."
    )
    assert [line.split(" ")[0] for line in lines] == ["::error", "::warning", "::error"]


def sarif_results(text: str, **more: Any) -> list[dict[str, Any]]:
    log = json.loads(FORMATS["sarif"](report(text, **more)))
    jsonschema.Draft7Validator(SARIF).validate(log)
    results: list[dict[str, Any]] = log["runs"][0]["results"]
    for result in results:
        assert log["runs"][0]["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    return results


def test_sarif() -> None:
    stage, amp, syntax = sarif_results(CONFIG)
    location = stage["locations"][0]["physicalLocation"]
    assert location["artifactLocation"]["uri"] == "dir/ds%20config.json"
    assert location["region"] == {"startLine": 3, "startColumn": 11, "endLine": 3, "endColumn": 12}
    assert (stage["level"], amp["level"]) == ("error", "warning")
    assert "fixes" not in syntax
    [replacement] = stage["fixes"][0]["artifactChanges"][0]["replacements"]
    start, length = replacement["deletedRegion"]["charOffset"], replacement["deletedRegion"]["charLength"]
    edit = Edit(Span(start, start + length), replacement["insertedContent"]["text"])
    assert edited(CONFIG, [edit]) == CONFIG.replace("4", "3")
    assert sarif_results("{train_batch_size: 1}") == []


def test_sarif_uris() -> None:
    [result] = sarif_results('{"train_batch_size": 1, "amp": 1}', path="/a b/ü:1.json")
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == "file:///a%20b/%C3%BC%3A1.json"


@properties
@given(CONFIGS | broken() | NOISE)
def test_every_format_writes_anything(text: str) -> None:
    everything = report(text, rules=RULES)
    for name in FORMATS:
        assert FORMATS[name](everything) or name == "github"
    sarif_results(text, rules=RULES)
    assert len(json.loads(FORMATS["json"](everything))) == len(everything.diagnostics)
