"""The JSON file and the table."""

import pytest

from deepspeed_compress.tools.gpu_check.findings import VERDICTS, Finding, document
from deepspeed_compress.tools.gpu_check.table import print_table

FOUND = [
    Finding("quantize", "pass", "3 sizes", "as plain torch", part="kernels"),
    Finding("decode", "fail", "9 elements", "as plain torch", "result 0 differs", "kernels"),
    Finding("top-k", "missed", "40% of copy", ">= 50% of copy", part="speed"),
    Finding("memcheck", "not run", why="compute-sanitizer is not on PATH", part="sanitizer"),
]


def test_the_document_counts_verdicts() -> None:
    found = document(FOUND, {"torch": "2.13"})
    assert found["verdicts"] == dict.fromkeys(VERDICTS, 1)
    assert found["findings"][1] == {
        "what": "decode",
        "verdict": "fail",
        "figure": "9 elements",
        "goal": "as plain torch",
        "why": "result 0 differs",
        "part": "kernels",
    }


def test_the_table_has_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("a GPU", FOUND)
    shown = capsys.readouterr().out
    head, *lines = [
        line.split() for line in shown.splitlines() if any(part in line for part in ("part ", "kernels", "speed"))
    ]
    assert head == ["part", "what", "figure", "goal", "verdict"]
    assert lines[2] == ["speed", "top-k", "40%", "of", "copy", ">=", "50%", "of", "copy", "missed"]
    for text in ("fail: result 0 differs", "not run: compute-sanitizer is not on PATH", "a GPU"):
        assert text in shown


def test_what_says_the_same_is_one_row_but_never_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    several = [Finding(f"row {number}", "pass", part="kernels") for number in range(40)]
    print_table("", [*several, *(Finding(f"bad {number}", "fail", part="kernels") for number in range(40))])
    shown = capsys.readouterr().out
    assert "40 from row 0 to row 39" in shown
    assert "row 7" not in shown
    assert shown.count("fail") == 40


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("", [Finding("x[red]", "fail", why="list[int]", part="steps")])
    assert "x[red]" in (shown := capsys.readouterr().out)
    assert "list[int]" in shown
