"""From the section of the configuration to reducers."""

from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo

from deepspeed_compress.build import RAW, Reduction, build_reduction, compressor_from
from deepspeed_compress.compressors import Blockwise, Cast, Compressor, TopK
from deepspeed_compress.config import SECTION, CompressConfig, parse_section
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.feedback import WithFeedback, WithoutFeedback
from tests.support.threads import TIMEOUT

PARAMETERS = ["embed.weight", "layer.0.weight", "layer.0.bias", "head.weight"]


@pytest.fixture
def group() -> ProcessGroup:
    return ProcessGroupGloo(HashStore(), 0, 1, TIMEOUT)


def section(gradients: dict[str, Any], **others: Any) -> CompressConfig:
    return parse_section({SECTION: {"gradients": gradients, **others}})


def build(group: ProcessGroup, config: CompressConfig, exempt: tuple[str, ...] = (), **options: Any) -> Reduction:
    defaults = {"parameters": PARAMETERS, "raw_dtype": torch.float32, "transactional": False}
    return build_reduction(config, group, exempt=exempt, **{**defaults, **options})


def uncompressed(reduction: Reduction) -> list[str]:
    return [name for name in PARAMETERS if reduction.compressed.codec_of(name) == RAW]


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ({}, Blockwise(bits=8, block_size=256)),
        ({"method": "bf16"}, Cast(torch.bfloat16)),
        ({"method": "fp16"}, Cast(torch.float16)),
        ({"bits": 4, "block_size": 64}, Blockwise(4, 64)),
        ({"rounding": "stochastic"}, Blockwise(8, 256, stochastic=True)),
        ({"method": "topk"}, TopK(0.01, 4096, Cast(torch.float32))),
        ({"method": "topk", "density": 0.1, "block_size": 1024}, TopK(0.1, 1024)),
        ({"method": "topk", "values": {"bits": 4}}, TopK(0.01, 4096, Blockwise(4, 256))),
        ({"method": "topk", "values": {"method": "fp16"}}, TopK(0.01, 4096, Cast(torch.float16))),
        (
            {"method": "topk", "values": {"block_size": 32, "rounding": "stochastic"}},
            TopK(0.01, 4096, Blockwise(8, 32, stochastic=True)),
        ),
    ],
    ids=repr,
)
def test_every_setting_reaches_its_compressor(gradients: dict[str, Any], expected: Compressor) -> None:
    assert compressor_from(section(gradients).gradients) == expected


@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize(
    ("feedback", "dtype"),
    [({}, torch.bfloat16), ({"dtype": "bf16"}, torch.bfloat16), ({"dtype": "fp32"}, torch.float32)],
)
def test_feedback_has_a_store_for_each_direction(
    group: ProcessGroup, feedback: dict[str, str], dtype: torch.dtype, transactional: bool
) -> None:
    reduction = build(group, section({"error_feedback": feedback}), transactional=transactional)
    gradients, means = reduction.compressed.encoders[1], reduction.compressed.mean_encoders[1]
    assert isinstance(gradients, WithFeedback)
    assert isinstance(means, WithFeedback)
    assert dict(reduction.residuals) == {"gradients": gradients.residuals, "means": means.residuals}
    assert gradients.residuals is not means.residuals
    for residuals in reduction.residuals.values():
        assert (residuals.dtype, residuals.transactional) == (dtype, transactional)


def test_null_switches_feedback_off(group: ProcessGroup) -> None:
    reduction = build(group, section({"error_feedback": None}))
    assert not reduction.residuals
    expected = WithoutFeedback(Blockwise())
    assert reduction.compressed.encoders[1] == reduction.compressed.mean_encoders[1] == expected


@pytest.mark.parametrize(
    ("patterns", "exempt", "expected"),
    [
        ([], (), []),
        (["embed|bias"], (), ["embed.weight", "layer.0.bias"]),
        (["^head", r"\.bias$"], (), ["layer.0.bias", "head.weight"]),
        ([], ("embed.weight",), ["embed.weight"]),
        (["head"], ("embed.weight",), ["embed.weight", "head.weight"]),
    ],
)
def test_overrides_and_exempt_parameters_go_uncompressed(
    group: ProcessGroup, patterns: list[str], exempt: tuple[str, ...], expected: list[str]
) -> None:
    overrides = [{"parameters": pattern, "method": "none"} for pattern in patterns]
    assert uncompressed(build(group, section({"overrides": overrides}), exempt)) == expected


def test_an_override_that_matches_nothing_warns_with_its_place(group: ProcessGroup) -> None:
    overrides = [{"parameters": pattern, "method": "none"} for pattern in ("bias", "^wte")]
    with pytest.warns(CompressWarning) as caught:
        reduction = build(group, section({"overrides": overrides}))
    [message] = [str(warning.message) for warning in caught]
    for words in (
        "/deepspeed_compress/gradients/overrides/1/parameters",
        "'^wte'",
        "embed.weight",
        "no effect",
        "write",
    ):
        assert words in message
    assert uncompressed(reduction) == ["layer.0.bias"]


def test_a_rank_without_parameters_has_nothing_to_match(group: ProcessGroup) -> None:
    config = section({"overrides": [{"parameters": "bias", "method": "none"}]})
    assert build(group, config, parameters=[]).compressed.codec_of("bias") != RAW


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_uncompressed_elements_travel_in_the_dtype_of_the_gradients(group: ProcessGroup, dtype: torch.dtype) -> None:
    reduction = build(group, section({}), raw_dtype=dtype)
    for reducer in (reduction.compressed, reduction.plain):
        assert reducer.encoders[RAW] == reducer.mean_encoders[RAW] == WithoutFeedback(Cast(dtype))


def test_the_plain_reducer_compresses_nothing_and_shares_clock_and_meter(group: ProcessGroup) -> None:
    reduction = build(group, section({}))
    assert {reduction.plain.codec_of(name) for name in PARAMETERS} == {RAW}
    for reducer in (reduction.compressed, reduction.plain):
        assert reducer.clock is reduction.clock
        assert reducer.meter is reduction.meter
        assert reducer.group is group


def test_the_seed_reaches_the_reducer(group: ProcessGroup) -> None:
    assert build(group, section({"rounding": "stochastic"}, seed=7)).compressed.seed == 7
