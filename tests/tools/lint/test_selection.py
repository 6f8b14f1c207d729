"""Selection of rules by options, by pyproject.toml, and by the configuration itself."""

import re
from pathlib import Path

import pytest

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.lint.command import find_settings
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import Selection, check_codes, ignored_inside
from deepspeed_compress.tools.lint.scanner import parse
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


@pytest.mark.parametrize(
    ("code", "nearest"),
    [
        ("DSC999", "DSC9"),
        ("dsc202", "DSC202"),
        ("unknwn-key", "unknown-key"),
        *((code, "DSC001, or syntax-error") for code in ("D", "")),
    ],
)
def test_an_unknown_rule_suggests_its_neighbor(code: str, nearest: str) -> None:
    check_codes(["ALL", "DSC4", "unknown-key"], RULES, "rule")
    with pytest.raises(ConfigError, match=f"^--select: {code!r} is not a rule .* Write {nearest}"):
        check_codes([code], RULES, "--select")


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
    (tmp_path / "pyproject.toml").write_text(TABLE)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (below / "pyproject.toml").write_text("[tool.other]\nlint = 1\n")
    settings, per_file = find_settings(below)
    assert (settings.select, settings.ignore, settings.exclude) == (["ALL"], ["DSC201"], ["old/*"])
    assert (settings.framework, settings.force_exclude, settings.exit_on) == ("hf", True, "error")
    assert (settings.world_size, settings.ranks_per_node) == (8, 4)
    assert per_file == {"*zero3*": ("DSC4",)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = ", "pyproject.toml: Invalid value"),
        ("[tool.ds-compress]\nlint = 1", "is 1. Write a table."),
        ("[tool.ds-compress.lint]\nignored = []", "unknown key 'ignored' (allowed: select, ignore, "),
        ("[tool.ds-compress.lint]\nignored = []", "Write ignore."),
        ("[tool.ds-compress.lint]\nworld-size = 0", "argument --world-size: '0' is not a positive integer"),
        ('[tool.ds-compress.lint]\nframework = "jax"', "argument --framework: invalid choice: 'jax'"),
        ("[tool.ds-compress.lint]\nforce-exclude = 1", "argument --force-exclude: "),
        ('[tool.ds-compress.lint]\nexit-on = "never"', "argument --exit-on: invalid choice: 'never'"),
        ("[tool.ds-compress.lint]\nper-file-ignores = {a = 1}", "per-file-ignores is {'a': 1}. Write a table"),
    ],
)
def test_wrong_settings(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        find_settings(tmp_path)


@pytest.mark.parametrize("text", ["", "tool = 1", "[tool]\nds-compress = 2", "[tool.ds-compress]"])
def test_no_settings(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    settings, per_file = find_settings(tmp_path)
    assert (settings.select, settings.ignore, settings.framework, per_file) == ([], [], None, {})
