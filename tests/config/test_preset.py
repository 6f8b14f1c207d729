"""`preset: "auto"`, and what cannot be combined with it."""

from typing import Any

import pytest

from deepspeed_compress import ConfigError
from deepspeed_compress.config import SECTION, brief, parse_section, with_preset
from deepspeed_compress.config.section import find_problems


def document(section: Any, stage: int = 1, **zero: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **zero}, SECTION: section}


@pytest.mark.parametrize(
    ("stage", "weights"), [(0, "none"), (1, "blockwise bits=4"), (2, "blockwise bits=4"), (3, "blockwise bits=8")]
)
def test_the_stage_determines_the_weights(stage: int, weights: str) -> None:
    section = parse_section(document({"preset": "auto"}, stage))
    assert section.auto is not None
    assert (brief(section.gradients), brief(section.weights)) == ("blockwise bits=4", weights)


def test_the_stage_of_the_section_counts() -> None:
    section = parse_section({SECTION: {"preset": "auto", "parallelism": {"zero_stage": 3}}})
    assert brief(section.weights) == "blockwise bits=8"


@pytest.mark.parametrize(
    ("section", "zero"),
    [
        ({"parallelism": {"shard_within": 2}}, {}),
        ({"parallelism": {"pipeline": 2}}, {}),
        ({}, {"stage": 3, "zero_hpz_partition_size": 2}),
        ({}, {"stage": 3, "zero_quantized_weights": True}),
        ({}, {"stage": 3, "zero_quantized_nontrainable_weights": True}),
    ],
)
def test_weights_that_cannot_be_compressed_are_left_out(section: dict[str, Any], zero: dict[str, Any]) -> None:
    written = with_preset(document({"preset": "auto", **section}, **{"stage": 1, **zero}))
    assert "weights" not in written


def test_keys_that_are_off_change_nothing() -> None:
    zero = {"zero_hpz_partition_size": 1, "zero_quantized_weights": False}
    assert brief(parse_section(document({"preset": "auto"}, 3, **zero)).weights) == "blockwise bits=8"


def test_written_keys_stay() -> None:
    written = {"gradients": {"method": "topk", "density": 0.1}, "weights": {"method": "none"}, "auto": {"steps": 20}}
    section = parse_section(document({"preset": "auto", **written}))
    assert section == parse_section(document(written))


def test_a_section_without_a_preset_is_returned_as_it_is() -> None:
    for section in ({}, {"preset": None}, None, 3, {"preset": "fast"}):
        assert with_preset({SECTION: section}) is section


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/deepspeed_compress/preset.*allowed: .*auto"):
        parse_section(document({"preset": "fast"}))


@pytest.mark.parametrize(
    ("section", "pointer"),
    [
        ({"gradients": {"method": "none"}, "weights": {"bits": 4}}, "gradients/method"),
        ({"adaptive": {}}, "adaptive"),
        ({"islands": {"size": 2, "sync_every": 4}}, "islands"),
        ({"schedule": {"warmup_steps": 10}}, "schedule"),
        ({"communication": {"max_rate": "1 Gbit/s"}}, "communication/max_rate"),
    ],
)
def test_contradictions(section: dict[str, Any], pointer: str) -> None:
    found = [str(problem) for problem in find_problems(document({"preset": "auto", **section}))]
    assert any(f"/{SECTION}/{pointer}" in text and "cannot be combined with auto" in text for text in found)
