"""The bugs of `planted_bugs` can be planted: each text occurs once in its file, and the result compiles."""

import ast
from pathlib import Path

import pytest

import deepspeed_compress
from tests.planted_bugs import BUGS, ROOT, Bug, PlantError

PACKAGE = Path(deepspeed_compress.__file__).parent


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_it_can_be_planted(bug: Bug) -> None:
    planted = bug.planted(PACKAGE)
    assert planted != (PACKAGE / bug.file).read_text(encoding="utf-8")
    if bug.file.endswith(".py"):
        ast.parse(planted)


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_the_tests_that_should_find_it_exist(bug: Bug) -> None:
    assert [test for test in bug.tests if not (ROOT / "tests" / test).exists()] == []


def test_a_text_that_does_not_occur_exactly_once_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\none\n")
    for old, count in (("one", 2), ("two", 0)):
        with pytest.raises(PlantError, match=f"a.py has {count} times, not once: {old}"):
            Bug("a.py", old, "three", ()).planted(tmp_path)
