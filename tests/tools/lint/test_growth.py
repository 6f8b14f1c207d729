"""Time that the linter takes for hostile files: four times the text takes about four times as long."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import Selection, lint_document
from deepspeed_compress.tools.lint.scanner import MAX_PARTS, MAX_PROBLEMS, parse
from deepspeed_compress.tools.outputs import Report, render

SAMPLED = pytest.mark.sampled(10)

Text = Callable[[int], str]


def keys(pair: Callable[[int], str], around: str = "{}", between: str = ",") -> Text:
    """Return a text of n keys inside `around`, of which the last `{}` is filled."""
    before, _, behind = around.rpartition("{}")
    return lambda n: before + "{" + between.join(map(pair, range(n))) + "}" + behind


TEXTS: Mapping[str, tuple[Text, int]] = {
    "equal keys": (keys(lambda i: '"a": 1'), 500),
    "misplaced keys": (keys(lambda i: '"offload_optimizer": {"device": "cpu"}'), 500),
    "misspelled keys": (keys(lambda i: f'"stag{i}": 1', '{"zero_optimization": {}}'), 1000),
    "unknown keys of our section": (keys(lambda i: f'"grad{i}": 1', '{"deepspeed_compress": {}}'), 500),
    "comments": (lambda n: "{" + "# c\n" * n + "}", 4000),
    "triple quotes on one line": (keys(lambda i: f"k{i}: '''x'''"), 2000),
    "errors": (lambda n: "{" + "," * n, 4000),
    "braces": (lambda n: "{" * n, 200_000),
    "placeholders": (keys(lambda i: f'"k{i}": "${{x}}"'), 2000),
    "one long string": (lambda n: '{"a": "' + "x" * n + '"}', 1_000_000),
}


def seconds(text: str) -> float:
    """Return the processor time that linting and two reports take."""
    start = time.process_time()
    document = parse(text)
    found = tuple(lint_document(document, Context(framework="hf", world_size=8), Selection()))
    for name in ("full", "sarif"):
        render(Report(found, 1, RULES), name)
    return time.process_time() - start


# Processor time depends on what else runs.
@pytest.mark.serial
@SAMPLED
@pytest.mark.parametrize("name", TEXTS)
def test_time_grows_with_the_text(name: str) -> None:
    """Four times the text may take eight times as long. Quadratic time would be sixteen times as long."""
    text, n = TEXTS[name]
    seconds(text(10))  # loads what is loaded once
    limit = 8 * min(seconds(text(n)) for _ in range(2)) + 0.05
    assert any(seconds(text(4 * n)) < limit for _ in range(2))


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
