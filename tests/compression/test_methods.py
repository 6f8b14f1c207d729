"""The compressor and the transform of a method's settings."""

from typing import Any

import pytest
import torch

from deepspeed_compress.compression.compressors import (
    FP8,
    QSGD,
    BlockTopK,
    Blockwise,
    Cast,
    Compressor,
    Linear,
    Percentile,
    RandomK,
    Sign,
    TopK,
)
from deepspeed_compress.compression.transforms import DCT, Hadamard, Identity
from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.config.schema import json_schema
from tests.support.sections import OF_GRADIENTS, QUANTIZERS

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def gradients_of(gradients: dict[str, Any]) -> Any:
    return parse_section({SECTION: {"gradients": gradients}}).gradients


# Every key of every quantizer, with the values of tests/support/sections.py.
QUANTIZED: dict[str, Compressor] = {
    "bf16": Cast(BF16),
    "fp16": Cast(FP16),
    "blockwise": Blockwise(2, 64, stochastic=True, scale_dtype=BF16),
    "linear": Linear(2, 64, stochastic=False, scale_dtype=FP16),
    "stochastic_linear": Linear(4, 64, stochastic=True, scale_dtype=FP16),
    "percentile": Percentile(8, 64, 99.9, stochastic=True),
    "qsgd": QSGD(127, 64),
    "fp8_e4m3": FP8("e4m3", 64),
    "fp8_e5m2": FP8("e5m2", 64),
    "sign": Sign(64, 3, torch.bfloat16),
}
INT4 = Blockwise(4, 256)
SPARSIFIED: dict[str, Compressor] = {
    "topk": TopK(0.1, 64, INT4, "block", 0.5),
    "randomk": RandomK(0.1, 64, INT4, rescale=False),
    "block_topk": BlockTopK(0.1, 1024, 64, INT4),
    "dgc": TopK(0.1, 64, INT4, "block", 0.5),
    "demo": TopK(0.1, 32 * 32, INT4),
}


def test_the_tables_contain_every_method() -> None:
    gradients = set(json_schema()["properties"]["gradients"]["discriminator"]["mapping"])
    assert gradients == {*QUANTIZED, *SPARSIFIED, "none", "powersgd"}


@pytest.mark.parametrize("method", [*QUANTIZED, *SPARSIFIED])
def test_every_setting_reaches_its_compressor(method: str) -> None:
    settings = gradients_of({"method": method, **OF_GRADIENTS[method]})
    assert settings.compressor() == {**QUANTIZED, **SPARSIFIED}[method]


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ({}, Blockwise(8, 256)),
        ({"method": "linear"}, Linear(8, 256)),
        ({"method": "percentile"}, Percentile(4, 256, 99.0)),
        ({"method": "qsgd"}, QSGD(7, 256)),
        ({"method": "fp8_e4m3"}, FP8("e4m3", 256)),
        ({"method": "sign"}, Sign(256)),
        ({"method": "topk"}, TopK(0.01, 4096, Cast(FP32))),
        ({"method": "topk", "scope": "threshold"}, TopK(0.01, 4096, scope="threshold")),
        ({"method": "randomk", "rescale": True, "error_feedback": None}, RandomK(0.01, 4096, rescale=True)),
        ({"method": "block_topk"}, BlockTopK(0.01, 65536, 32)),
        ({"method": "dgc"}, TopK(0.001, 4096, Cast(FP32))),
        ({"method": "demo"}, TopK(0.01, 4096, INT4)),
        ({"method": "demo", "values": None}, TopK(0.01, 4096, Cast(FP32))),
    ],
    ids=repr,
)
def test_defaults_reach_their_compressor(gradients: dict[str, Any], expected: Compressor) -> None:
    assert gradients_of(gradients).compressor() == expected


@pytest.mark.parametrize("method", [*QUANTIZED, *SPARSIFIED])
@pytest.mark.parametrize("defaults", [True, False])
def test_bits_per_element_match_the_payload_size(method: str, defaults: bool) -> None:
    settings = gradients_of({"method": method, **({} if defaults else OF_GRADIENTS[method])})
    numel = 2**20
    assert settings.bits_per_element() == pytest.approx(8 * settings.compressor().payload_bytes(numel) / numel, 1e-4)


@pytest.mark.parametrize("values", QUANTIZED)
def test_the_method_of_values_reaches_its_compressor(values: str) -> None:
    settings = gradients_of({"method": "topk", "values": {"method": values, **QUANTIZERS[values]}})
    assert settings.compressor() == TopK(0.01, 4096, QUANTIZED[values])


@pytest.mark.parametrize(
    ("gradients", "transform"),
    [
        ({}, Identity()),
        ({"rotation": {"method": "hadamard"}}, Hadamard(1024)),
        ({"rotation": {"method": "hadamard", "block_size": 64}}, Hadamard(64)),
        ({"method": "topk", "rotation": {"method": "dct", "tile": 16}}, DCT({"a": 8}, 16)),
        ({"method": "demo"}, DCT({"a": 8}, 64)),
        ({"method": "demo", "tile": 32}, DCT({"a": 8}, 32)),
    ],
    ids=repr,
)
def test_settings_reach_their_transform(gradients: dict[str, Any], transform: object) -> None:
    assert gradients_of(gradients).transform({"a": 8}) == transform


@pytest.mark.parametrize(
    ("density", "steps", "expected"),
    [
        (0.005, 8, [0.25, 0.25, 0.25**2, 0.25**2, 0.25**3, 0.25**3, 0.005, 0.005, 0.005]),
        (0.1, 8, [0.25, 0.25, *[0.1] * 6, 0.1]),
        (0.1, 2, [0.25, 0.1, 0.1, 0.1]),
        (0.1, 0, [0.1, 0.1]),
    ],
)
def test_the_density_falls_in_four_stages(density: float, steps: int, expected: list[float]) -> None:
    settings = gradients_of({"method": "topk", "density": density, "density_warmup_steps": steps})
    found = [settings.compressor(step) for step in range(len(expected))]
    assert found == [TopK(wanted) for wanted in expected]
