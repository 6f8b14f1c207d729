"""`ds-compress lint` and `ds-compress rule`, from their arguments to exit code and output."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.diagnostics import Diagnostic
from deepspeed_compress.tools.lint import command
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.rule import Context, LintRule
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import Selection, lint_document
from deepspeed_compress.tools.lint.scanner import parse
from tests.tools.lint.texts import STRICT, TOYS, rule

BAD = '{"zero_optimization": {"stage": 4}, "amp": {}}'


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run tests in an empty directory, with rules that do not change."""
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, *TOYS)


def use(monkeypatch: pytest.MonkeyPatch, *rules: LintRule) -> None:
    """Give the command these rules only."""

    def lint(document: Document, context: Context, selection: Selection) -> list[Diagnostic]:
        return lint_document(document, context, selection, rules)

    monkeypatch.setattr(command, "RULES", rules)
    monkeypatch.setattr(command, "lint_document", lint)


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command, and return its exit code, output, and errors."""

    def run(*arguments: str, stdin: str = "", name: str = "lint") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        try:
            code = main([name, *arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        return code, written.out, written.err

    return run


def save(text: str, name: str = "ds_config.json") -> Path:
    path = Path(name)
    path.write_text(text)
    return path


def test_exit_codes(lint: Run) -> None:
    save("{}")
    assert lint() == (0, "1 file checked, nothing found.\n", "")
    save(BAD)
    code, out, _ = lint()
    assert code == 1
    assert "DSC401" in out
    assert lint("--select", "DSC201")[0] == 0
    assert lint("--select", "DSC201", "--world-size", "4")[0] == 1
    assert lint("--ignore", "DSC4,DSC1")[0] == 0


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("{amp: {}}", {"error": 0, "warning": 1, "info": 1}),
        ("{a: 1}", {"error": 0, "warning": 0, "info": 1}),
        ('{"zero_optimization": {"stage": 4}}', {"error": 1, "warning": 1, "info": 1}),
        ("", {"error": 0, "warning": 0, "info": 1}),
        ('{"a": 1}', {"error": 0, "warning": 0, "info": 0}),
    ],
)
def test_severity_that_fails_the_command(
    lint: Run, monkeypatch: pytest.MonkeyPatch, text: str, codes: dict[str, int]
) -> None:
    use(monkeypatch, *TOYS, STRICT)
    save(text)
    assert lint()[0] == codes["warning"]
    assert {severity: lint("--exit-on", severity)[0] for severity in codes} == codes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.json"], "none.json: no such file or directory"),
        (["--select", "DSC9"], "--select: 'DSC9' is not a rule"),
        (["--ignore", "x"], "--ignore: 'x' is not a rule"),
        (["--fix", "-"], "--fix: standard input cannot be corrected"),
        (["--world-size", "0"], "'0' is not a positive integer"),
        (["--framework", "jax"], "invalid choice: 'jax'"),
        (["--model", "nowhere"], "--model nowhere: No such file or directory"),
        (["--model", "list.json"], "--model list.json: list (allowed: an object)"),
        (["--model", "ds_config.json"], "--model ds_config.json: not JSON"),
        (["--exit-on", "never"], "invalid choice: 'never'"),
        (["--frame-work", "hf"], "unrecognized arguments: --frame-work"),
        (["fifo"], "fifo: a FIFO (allowed: a regular file)"),
        (["--model", "fifo"], "fifo: a FIFO (allowed: a regular file)"),
    ],
)
def test_wrong_usage(lint: Run, arguments: list[str], message: str) -> None:
    save("{a: 1}")
    save("[1]", "list.json")
    os.mkfifo("fifo")
    code, _, err = lint(*arguments)
    assert code == 2
    assert message in err


def test_an_unknown_option_shows_the_usage_of_the_command(lint: Run) -> None:
    for name, positional in {"lint": ["x"], "check": ["x"], "plan": ["schedule", "x"], "schema": []}.items():
        code, out, err = lint(*positional, "--nonsense", "1", name=name)
        assert (code, out) == (2, "")
        assert err.startswith(f"usage: ds-compress {name} ")
        assert f"ds-compress {name}: error: unrecognized arguments: --nonsense" in err


def test_a_rule_that_fails_is_an_internal_error(lint: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(document: Document, context: Context) -> list[Diagnostic]:
        raise ZeroDivisionError("oh")

    save("{}")
    use(monkeypatch, rule("DSC900", "breaks", check))
    code, _, err = lint()
    assert code == 2
    assert "ds_config.json: rule DSC900 breaks failed (ZeroDivisionError: oh). Write --ignore DSC900" in err


def test_a_directory_without_configurations(lint: Run) -> None:
    assert lint() == (
        0,
        "0 files checked, nothing found.\n",
        "ds-compress: warning: no DeepSpeed configuration in .\n",
    )


def test_excluded_files(lint: Run) -> None:
    for name in ("ds_config.json", "old/ds_config.json", "package.json"):
        Path(name).parent.mkdir(exist_ok=True)
        save(BAD, name)
    save('{"name": "x"}', "package.json")
    count = "--output-format", "concise", "--select", "DSC4"
    assert lint(*count, "--exclude", "ds_config.json")[2] == "ds-compress: warning: no DeepSpeed configuration in .\n"
    assert lint(*count, "--exclude", "none,old")[1].startswith("ds_config.json:")
    assert lint(*count, "--exclude", "old", "old/ds_config.json")[0] == 1


def test_options_that_describe_the_run(lint: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Context] = []

    def watch(document: Document, context: Context) -> tuple[()]:
        seen.append(context)
        return ()

    use(monkeypatch, rule("DSC900", "watches", watch))
    save("{}")
    Path("model").mkdir()
    save('{"hidden_size": 8}', "model/config.json")
    options = "--world-size 8 --ranks-per-node 4 --framework hf --model model"
    lint(*options.split())
    lint()
    save("deepspeed_config:\n  deepspeed_config_file: ds_config.json\nnum_processes: 16\n", "a.yaml")
    lint("a.yaml", "--world-size", "2")
    assert seen == [
        Context(8, 4, "hf", {"hidden_size": 8}),
        Context(),
        Context(world_size=2, framework="accelerate"),
    ]


AUTO = '{"train_batch_size": "auto"}'


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        (AUTO, "hf"),
        ('{"zero_optimization": {"reduce_bucket_size": "auto"}}', "hf"),
        ('{"optimizer": {"params": {"lr": "auto"}}}', "hf"),
        ("zero_optimization: {stage: auto}", "hf"),
        ("train_batch_size: 8", None),
        ('{"train_batch_size": "auto", "autotuning": {"enabled": true}}', None),
        ('{"zero_optimization": {"zenflow": {"topk_ratio": "auto"}}}', None),
        ('{"data_types": {"keep_in_fp32_modules": "auto"}}', None),
    ],
)
def test_auto_reveals_the_framework(
    lint: Run, monkeypatch: pytest.MonkeyPatch, text: str, framework: str | None
) -> None:
    """A note on standard error says so. The output, which programs read, does not."""
    seen: list[str | None] = []

    def check(document: Document, context: Context) -> list[Diagnostic]:
        seen.append(context.framework)
        return []

    use(monkeypatch, rule("DSC900", "watches", check))
    name = str(save(text, "ds_config.yaml" if text[0] != "{" else "ds_config.json"))
    sign = '"auto" values or the file that names it'
    note = f"ds-compress: note: {name}: checked for hf, because of {sign}; --framework overrides this\n"
    assert lint() == (0, "1 file checked, nothing found.\n", note if framework else "")
    assert lint("--framework", "lightning")[2] == ""
    assert lint("--framework", "swift")[2] == ""
    assert seen == [framework, "lightning", "hf"]


def test_frameworks_of_many_files_are_reported_once(lint: Run) -> None:
    for name in ("ds_config_1.json", "ds_config_2.json", "ds_config_3.json"):
        save(AUTO, name)
    save("deepspeed_config: {}", "a.yaml")
    assert lint("--ignore", "ALL")[2].splitlines() == [
        'ds-compress: note: ds_config_1.json and 2 more files: checked for hf, because of "auto" values or the file '
        "that names it; --framework overrides this",
        "ds-compress: note: a.yaml: checked for accelerate, because of keys of Accelerate; --framework overrides this",
    ]


def test_ignoring_no_rule_causes_a_warning(lint: Run) -> None:
    save('{"deepspeed_compress": {"lint": {"ignore": ["stage"]}}}')
    assert lint()[2].startswith("ds-compress: warning: ds_config.json: 'stage' is not a rule")


def test_fix_writes_the_file(lint: Run) -> None:
    path = save(f"// mine\r\n{BAD}")
    code, out, _ = lint("--fix")
    assert (code, out) == (0, "Fixed 2 findings. 1 file checked, nothing found.\n")
    assert path.read_bytes() == b'// mine\r\n{"zero_optimization": {"stage": 3}}'


def test_fix_keeps_the_permissions_and_the_link(lint: Run) -> None:
    path, link = save(BAD, "other.json"), Path("ds_config.json")
    path.chmod(0o640)
    link.symlink_to(path)
    assert lint("--fix", "ds_config.json")[0] == 0
    assert link.is_symlink()
    assert path.read_text() == '{"zero_optimization": {"stage": 3}}'
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(Path().iterdir()) == [link, path]


def test_colour_only_on_terminals(lint: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    save(BAD)
    assert "\x1b" not in lint()[1]
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda self: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in lint()[1]
    for name, value in (("TERM", "dumb"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
        assert "\x1b" not in lint()[1]


def test_no_key_is_missing_after_a_syntax_error() -> None:
    context = Context(world_size=4)
    for text, codes in (
        ("{}", ["DSC201"]),
        ('{"train_batch_size" 8, "amp": {}}', ["DSC001", "DSC101"]),
        ("just words", ["DSC001"]),
    ):
        found = lint_document(parse(text), context, Selection(), TOYS)
        assert [finding.code for finding in found] == codes


def test_rule(lint: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "RULES", RULES)
    first = RULES[0]
    code, out, _ = lint(first.code, name="rule")
    assert code == 0
    assert all(text in out for text in (first.code, first.name, first.summary, first.reason, first.wrong, first.right))
    assert lint(first.name, name="rule")[1] == out
    code, out, _ = lint("--all", name="rule")
    assert [line.split()[0] for line in out.splitlines()] == [rule.code for rule in RULES]
    for wrong in ((), ("DSC99",), (first.code, "--all")):
        code, _, err = lint(*wrong, name="rule")
        assert code == 2
        assert err.startswith("ds-compress: error: ")
