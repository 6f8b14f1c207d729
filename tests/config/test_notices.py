import warnings

import pytest

from deepspeed_compress.config import SECTION, CompressConfig, find_notices, parse_section
from deepspeed_compress.errors import CompressWarning


@pytest.mark.parametrize(
    ("section", "pointer"),
    [
        ({"gradients": {"method": "none"}, "schedule": {"warmup_steps": 5}}, "schedule/warmup_steps"),
        ({"seed": 3}, "seed"),
        ({"gradients": {"method": "topk", "density": 1}}, "gradients/density"),
        ({"gradients": {"method": "topk", "density": 0.01, "block_size": 64}}, "gradients/density"),
        (
            {"gradients": {"overrides": [{"parameters": "a", "method": "none"}] * 2}},
            "gradients/overrides/1/parameters",
        ),
        (
            {"gradients": {"overrides": [{"parameters": ".*", "method": "none"}]}},
            "gradients/overrides/0/parameters",
        ),
    ],
)
def test_settings_without_effect_warn(section: dict, pointer: str) -> None:
    with pytest.warns(CompressWarning) as caught:
        parse_section({SECTION: section})
    assert [str(w.message).split(":")[0] for w in caught] == [f"/{SECTION}/{pointer}"]


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"gradients": {"rounding": "stochastic"}, "seed": 3},
        {"gradients": {"method": "topk", "values": {"rounding": "stochastic"}}, "seed": 3},
        {"gradients": {"overrides": [{"parameters": "^$|embed", "method": "none"}]}},
    ],
)
def test_settings_with_effect_are_silent(section: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse_section({SECTION: section})


def test_defaults_have_no_notices() -> None:
    assert find_notices(CompressConfig()) == []
