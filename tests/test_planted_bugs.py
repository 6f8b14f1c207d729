"""The bugs of `planted_bugs` can be planted: each function and expression occurs once, and the result compiles."""

import ast
from pathlib import Path

import pytest

import deepspeed_compress
from tests.planted_bugs import BUGS, ROOT, Bug, PlantError

PACKAGE = Path(deepspeed_compress.__file__).parent


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_it_can_be_planted(bug: Bug) -> None:
    file, planted = bug.planted(PACKAGE)
    assert bug.old != bug.new
    if file.suffix == ".py":
        ast.parse(planted)
    assert bug.tests
    assert [test for test in bug.tests if not (ROOT / "tests" / test).exists()] == []


def test_what_does_not_occur_exactly_once_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def twice(x):\n    return x + 1 - (x + 1)\n")
    for function, old, message in (
        ("a.twice", "x + 1", r"x \+ 1 occurs 2 times"),
        ("twice", "x + 2", r"x \+ 2 occurs 0 times"),
        ("never", "x", "the function occurs 0 times"),
    ):
        with pytest.raises(PlantError, match=message):
            Bug(function, old, "0", ()).planted(tmp_path)
