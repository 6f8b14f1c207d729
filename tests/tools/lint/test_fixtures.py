"""Configurations whose comments name, line by line, the rules that report them."""

import json
import re
from pathlib import Path

import pytest

from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.runner import lint_text

FIXTURES = sorted(Path(__file__).with_name("fixtures").iterdir())
_CONTEXT = re.compile(r"# context: (\{.*\})")
_CODES = re.compile(r"DSC\d{3}")


def expected(text: str) -> set[tuple[int, str]]:
    """Return the lines with codes in the comments at their ends."""
    comments = [(number, line.partition("  # ")[2]) for number, line in enumerate(text.splitlines(), 1)]
    return {(number, code) for number, comment in comments for code in _CODES.findall(comment)}


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_findings_match_the_comments(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    context = _CONTEXT.match(text)
    findings = lint_text(text, path.name, Context(**json.loads(context[1]) if context else {}))
    assert {(finding.place.start[0], finding.code) for finding in findings} == expected(text)
