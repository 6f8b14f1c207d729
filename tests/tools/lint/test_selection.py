"""Selection of rules by options, by pyproject.toml, and by the configuration itself."""

import os
import re
from pathlib import Path

import pytest

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.lint.options import memory
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.scanner import parse
from deepspeed_compress.tools.lint.selection import (
    Selection,
    Settings,
    check_codes,
    find_settings,
    ignored_inside,
    read_settings,
)
from tests.tools.lint.texts import TOYS


def chosen(selection: Selection, text: str = "{}", path: str = "runs/zero3.json") -> list[str]:
    document = parse(text, path)
    return [rule.code for rule in selection.choose(TOYS, document)]


@pytest.mark.parametrize(
    ("select", "ignore", "codes"),
    [
        (("ALL",), (), ["DSC001", "DSC101", "DSC201", "DSC401"]),
        (("DSC1", "stage-range"), (), ["DSC101", "DSC401"]),
        (("ALL",), ("DSC",), []),
        (("ALL",), ("DSC4", "removed-amp"), ["DSC001", "DSC201"]),
        (("DSC401",), ("DSC4",), ["DSC401"]),
        (("DSC4",), ("DSC401",), []),
        (("DSC4",), ("DSC4",), []),
        (("DSC4",), ("ALL",), ["DSC401"]),
    ],
)
def test_the_closest_match_decides(select: tuple[str, ...], ignore: tuple[str, ...], codes: list[str]) -> None:
    assert chosen(Selection(select, ignore)) == codes


@pytest.mark.parametrize(
    ("pattern", "codes"),
    [
        ("zero3.json", ["DSC001", "DSC101", "DSC201"]),
        ("*zero3*", ["DSC001", "DSC101", "DSC201"]),
        ("runs/*", ["DSC001", "DSC101", "DSC201"]),
        ("zero", ["DSC001", "DSC101", "DSC201", "DSC401"]),
    ],
)
def test_ignored_per_file(pattern: str, codes: list[str]) -> None:
    assert chosen(Selection(per_file={pattern: ("DSC4",)})) == codes
    assert chosen(Selection(("DSC401",), per_file={pattern: ("DSC4",)})) == [code for code in codes if code == "DSC401"]


def test_ignored_inside_the_file() -> None:
    text = '{"deepspeed_compress": {"lint": {"ignore": ["stage-range", "DSC2", 5]}}}'
    assert chosen(Selection(), text) == ["DSC001", "DSC101"]
    for broken in ('{"deepspeed_compress": 1}', '{"deepspeed_compress": {"lint": {"ignore": "ALL"}}}', "[]"):
        assert ignored_inside(parse(broken)) == ()


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("// ds-compress: noqa: DSC4, removed-amp because\n{}", ["DSC001", "DSC201"]),
        ("{}\n#ds-compress:noqa:DSC4", ["DSC001", "DSC101", "DSC201"]),
        ('{"//": "ds-compress: noqa: DSC4"}', ["DSC001", "DSC101", "DSC201"]),
        ("/* ds-compress: noqa */ {}", []),
        ('{"ds-compress": "noqa: DSC4"}', ["DSC001", "DSC101", "DSC201", "DSC401"]),
        ('{"my-ds-compress: noqa": 1, "ds-compress: noqad": 1}', ["DSC001", "DSC101", "DSC201", "DSC401"]),
    ],
)
def test_ignored_by_a_comment(text: str, codes: list[str]) -> None:
    assert chosen(Selection(), text) == codes
    assert chosen(Selection(("DSC401",)), text) == [code for code in codes if code == "DSC401"]


def test_unknown_codes() -> None:
    assert check_codes(["ALL", "DSC4", "removed-amp"], TOYS, "--select") == ("ALL", "DSC4", "removed-amp")
    with pytest.raises(ConfigError, match=re.escape("--select: 'remove-amp' is not a rule")) as raised:
        check_codes(["remove-amp"], TOYS, "--select")
    assert "Write removed-amp" in str(raised.value)
    for code in ("D", "DS", "", "DSC9", "dsc401"):
        with pytest.raises(ConfigError):
            check_codes([code], TOYS, "--select")


def write(directory: Path, text: str) -> None:
    (directory / "pyproject.toml").write_text(text)


TABLE = """
[tool.ds-compress.lint]
select = ["ALL"]
ignore = ["DSC201"]
exclude = ["old/*"]
framework = "hf"
force-exclude = true
exit-on = "error"
world-size = 8
ranks-per-node = 4
[tool.ds-compress.lint.per-file-ignores]
"*zero3*" = ["DSC4"]
"""


def test_settings(tmp_path: Path) -> None:
    write(tmp_path, TABLE)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    write(below, "[tool.other]\nlint = 1\n")
    place = f"{tmp_path / 'pyproject.toml'}: [tool.ds-compress.lint]"
    expected = Settings(("ALL",), ("DSC201",), {"*zero3*": ("DSC4",)}, ("old/*",), True, "error", "hf", 8, 4, place)
    assert find_settings(below) == read_settings(tmp_path / "pyproject.toml") == expected


def test_a_file_that_holds_only_settings(tmp_path: Path) -> None:
    """It takes precedence over pyproject.toml. A file with another name must be given."""
    write(tmp_path, TABLE)
    for name in (".ds-compress-lint.toml", "other.toml"):
        (tmp_path / name).write_text('ignore = ["DSC1"]\n')
        assert read_settings(tmp_path / name) == Settings(ignore=("DSC1",), place=str(tmp_path / name))
    assert find_settings(tmp_path).place == str(tmp_path / ".ds-compress-lint.toml")


def test_a_named_settings_file_must_have_settings(tmp_path: Path) -> None:
    write(tmp_path, "[tool.other]\n")
    os.mkfifo(tmp_path / "fifo.toml")
    for name, message in (("pyproject.toml", "no table"), ("none.toml", "no such file"), ("fifo.toml", "no such file")):
        with pytest.raises(ConfigError, match=f"--config {tmp_path / name}: {message}"):
            read_settings(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "pyproject.toml: Invalid value"),
        ("[tool.ds-compress]\nlint = 1", "is 1. Write a table."),
        ("[tool.ds-compress.lint]\nignored = []", "unknown key 'ignored' (allowed: select, ignore, "),
        ("[tool.ds-compress.lint]\nignored = []", "Write ignore."),
        ('[tool.ds-compress.lint]\nignore = "DSC1"', "ignore is 'DSC1' (allowed: a list of rules)"),
        ("[tool.ds-compress.lint]\nworld-size = true", "world-size is True (allowed: a positive integer)"),
        (
            '[tool.ds-compress.lint]\nframework = "jax"',
            "framework is 'jax' (allowed: deepspeed, hf, accelerate, lightning)",
        ),
        ("[tool.ds-compress.lint]\nframework = []", "framework is [] (allowed: deepspeed, hf, accelerate, lightning)"),
        ("[tool.ds-compress.lint]\nforce-exclude = 1", "force-exclude is 1 (allowed: true, false)"),
        ('[tool.ds-compress.lint]\nexit-on = "never"', "exit-on is 'never' (allowed: error, warning, info)"),
        ("[tool.ds-compress.lint]\nper-file-ignores = {a = 1}", "per-file-ignores is {'a': 1} (allowed: "),
    ],
)
def test_wrong_settings(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_settings(tmp_path)


@pytest.mark.parametrize("text", ["", "tool = 1", "[tool]\nds-compress = 2", "[tool.ds-compress]"])
def test_no_settings(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    assert find_settings(tmp_path) == Settings()


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * 10**9), ("79.5 GiB", int(79.5 * 2**30)), ("512mb", 512 * 10**6), ("1TB", 10**12)]
)
def test_sizes(text: str, size: int) -> None:
    assert memory(text) == size


@pytest.mark.parametrize(
    ("code", "nearest"), [("DSC999", "DSC9"), ("DSC299", "DSC21"), ("dsc202", "DSC202"), ("unknwn-key", "unknown-key")]
)
def test_an_unknown_rule_suggests_its_neighbor(code: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"Write {nearest}"):
        check_codes([code], RULES, "rule")
