"""Time that the linter takes for hostile files: four times the text takes about four times as long."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.tools.lint.fixes import apply
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import MAX_FINDINGS, lint_document, shortened
from deepspeed_compress.tools.lint.scanner import MAX_PARTS, MAX_PROBLEMS, parse
from deepspeed_compress.tools.lint.selection import Selection
from deepspeed_compress.tools.outputs import Report, render

SAMPLED = pytest.mark.sampled(10)

Text = Callable[[int], str]


def keys(pair: Callable[[int], str], around: str = "{}", between: str = ",") -> Text:
    """Return a text of n keys inside `around`, of which the last `{}` is filled."""
    before, _, behind = around.rpartition("{}")
    return lambda n: before + "{" + between.join(map(pair, range(n))) + "}" + behind


TEXTS: Mapping[str, tuple[Text, int]] = {
    "equal keys": (keys(lambda i: '"a": 1'), 500),
    "equal keys on lines": (keys(lambda i: '"a": 1', between=",\n"), 500),
    "equal sections": (keys(lambda i: '"fp16": true'), 500),
    "misplaced keys": (keys(lambda i: '"offload_optimizer": {"device": "cpu"}'), 500),
    "misspelled keys": (keys(lambda i: f'"stag{i}": 1', '{"zero_optimization": {}}'), 1000),
    "misspelled parameters": (
        keys(lambda i: f'"betas{i}": 1', '{"optimizer": {"type": "AdamW", "params": {}}}'),
        1000,
    ),
    "unknown keys of our section": (keys(lambda i: f'"grad{i}": 1', '{"deepspeed_compress": {}}'), 500),
    "unknown keys of a method": (
        keys(lambda i: f'"bits{i}": 1', '{"deepspeed_compress": {"gradients": {}}}'),
        1000,
    ),
    "comments": (lambda n: "{" + "# c\n" * n + "}", 4000),
    "remarks": (lambda n: "{" + "# ds-compress: noqa: DSC100\n" * n + "}", 1000),
    "strings without quotes": (keys(lambda i: f"k{i}: some text", between="\n"), 2000),
    "triple quotes on one line": (keys(lambda i: f"k{i}: '''x'''"), 2000),
    "errors": (lambda n: "{" + "," * n, 4000),
    "strings without an end": (lambda n: "{" + '"a\n' * n, 4000),
    "braces": (lambda n: "{" * n, 200_000),
    "placeholders": (keys(lambda i: f'"k{i}": "${{x}}"'), 2000),
    "one long string": (lambda n: '{"a": "' + "x" * n + '"}', 1_000_000),
    "one long key": (lambda n: '{"' + "x" * n + '": 1}', 50_000),
    "one long line of space": (lambda n: '{"a": 1' + " " * n + "x}", 500_000),
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


@pytest.mark.slow
@pytest.mark.serial
def test_corrections_grow_with_the_text() -> None:
    def correct(n: int) -> float:
        text = keys(lambda i: f'"k{i}": "true"', '{"bf16": {}}')(n)[:-2] + ', "enabled": "true"' * n + "}}"
        start = time.process_time()
        fixed = apply(parse(text), lambda one: lint_document(one, Context(), Selection()), unsafe=True)
        assert fixed.count >= n
        return time.process_time() - start

    correct(10)
    limit = 8 * min(correct(500) for _ in range(2)) + 0.05
    assert any(correct(2000) < limit for _ in range(2))


def test_twenty_megabytes_of_braces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The limit is several times as long as they take, whatever else runs."""
    path = tmp_path / "ds_config.json"
    path.write_text("{" * 20_000_000)
    start = time.process_time()
    assert main(["lint", str(path)]) == 1
    assert time.process_time() - start < 10
    assert "where a key should be" in capsys.readouterr().out


@pytest.mark.slow
def test_nineteen_thousand_equal_keys_give_a_hundred_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("{" + ",".join(['"train_batch_size": 8'] * 19_000) + "}")
    assert main(["lint", str(path), "--select", "DSC002", "--output-format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found) == MAX_FINDINGS
    assert found[-1]["message"] == f"and {18_999 - MAX_FINDINGS + 1} more findings of this rule"
    assert main(["lint", str(path), "--select", "DSC002", "--statistics"]) == 1
    assert capsys.readouterr().out.startswith("18999  DSC002")


def test_findings_up_to_the_limit_are_all_reported() -> None:
    for count in (MAX_FINDINGS, MAX_FINDINGS + 1):
        document = parse(keys(lambda i: '"a": 1')(count + 1))
        found = list(shortened(lint_document(document, Context(), Selection(("DSC002",)))))
        assert len(found) == MAX_FINDINGS
        assert found[-1].message.startswith("and 2 more") == (count > MAX_FINDINGS)


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
