"""Selection of rules by options and by the configuration itself."""

import pytest

from deepspeed_compress.errors import ConfigError
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


def test_ignored_inside_the_file() -> None:
    text = '{"deepspeed_compress": {"lint": {"ignore": ["stage-range", "DSC2", 5]}}}'
    assert chosen(Selection(), text) == ["DSC001", "DSC101"]
    for broken in ('{"deepspeed_compress": 1}', '{"deepspeed_compress": {"lint": {"ignore": "ALL"}}}', "[]"):
        assert ignored_inside(parse(broken)) == ()


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
