"""Time that the linter takes for hostile files, and the number of errors that it reports."""

import time
from pathlib import Path

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.tools.lint.scanner import MAX_PARTS, MAX_PROBLEMS, parse


def test_twenty_megabytes_of_braces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The limit is several times as long as they take, whatever else runs."""
    path = tmp_path / "ds_config.json"
    path.write_text("{" * 20_000_000)
    start = time.process_time()
    assert main(["lint", str(path)]) == 1
    assert time.process_time() - start < 10
    assert "where a key should be" in capsys.readouterr().out


@pytest.mark.parametrize("count", [MAX_PROBLEMS - 2, MAX_PROBLEMS, 5000, 10 * MAX_PARTS])
def test_syntax_errors_are_counted(count: int) -> None:
    messages = [one.message for one in parse('{"a": 1, ' + ":," * count + "}").problems]
    assert len(messages) <= MAX_PROBLEMS
    if count <= MAX_PROBLEMS - 2:
        assert len(messages) == count
    elif count < MAX_PARTS:
        assert messages[-1] == f"and {count - MAX_PROBLEMS + 2} more syntax errors"
    else:
        assert messages[-2:][0] == f"more than {MAX_PARTS} values and comments"
