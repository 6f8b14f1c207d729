import re

import pytest

from deepspeed_compress.config import SECTION, CompressConfig, parse_section
from deepspeed_compress.config.section import find_notices
from deepspeed_compress.errors import CompressWarning

NARROW = {"parameters": "a", "method": "none"}


def overridden(**override: object) -> dict:
    """Return a section with one override."""
    return {"gradients": {"overrides": [{"parameters": "a", **override}]}}


@pytest.mark.parametrize(
    ("section", "pointer", "words"),
    [
        (
            {"rollout": {"directory": "/shared", "method": "blockwise"}},
            "rollout/bits",
            "8 has no effect with dtype bf16",
        ),
        (
            {"checkpointing": {"directory": "checkpoints", "memory": {"every": 1}}, "weights": {"bits": 4}},
            "checkpointing/memory/every",
            "1 gathers exact weights in every step",
        ),
        *(
            ({"gradients": {"method": method, "error_feedback": None}}, "gradients/error_feedback", f'"{method}" loses')
            for method in ("sign", "topk", "block_topk", "randomk", "powersgd")
        ),
        (
            {"gradients": {"error_feedback": None, "overrides": [{"parameters": "a", "method": "sign"}]}},
            "gradients/error_feedback",
            '"sign" loses',
        ),
        ({"gradients": {"method": "randomk", "rescale": True}}, "gradients/rescale", "diverges"),
        (overridden(method="randomk", rescale=True), "gradients/overrides/0/rescale", "diverges"),
        (
            {"gradients": {"method": "dgc", "overrides": [{"parameters": "a", "method": "randomk", "rescale": True}]}},
            "gradients/overrides/0/rescale",
            "diverges",
        ),
        ({"gradients": {"overrides": [NARROW, NARROW]}}, "gradients/overrides/1/parameters", "earlier override"),
        (overridden(parameters=".*", method="none"), "gradients/overrides/0/parameters", "every parameter"),
        (overridden(parameters="^", method="bf16"), "gradients/overrides/0/parameters", "every parameter"),
    ],
)
def test_settings_without_effect_warn(section: dict, pointer: str, words: str) -> None:
    with pytest.warns(CompressWarning) as caught:
        parse_section({SECTION: section})
    [message] = [str(warning.message) for warning in caught]
    assert message.startswith(f"/{SECTION}/{pointer}: ")
    assert re.search(words, message)


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"seed": 3},
        {"gradients": {"overrides": [{"parameters": "^$|embed", "method": "none"}]}},
        {"gradients": {"overrides": [{"parameters": ".*", "method": "blockwise", "every": 4}]}},
        {"gradients": {"method": "qsgd", "error_feedback": None}, "seed": 3},
        {"gradients": {"method": "randomk", "rescale": True, "error_feedback": None}},
        {"gradients": {"method": "topk", "density": 0.0001, "scope": "threshold"}},
    ],
)
def test_settings_with_effect_are_silent(section: dict) -> None:
    parse_section({SECTION: section})


def test_defaults_have_no_notices() -> None:
    assert find_notices(CompressConfig()) == []
