"""The line at the start names what is compressed besides gradients and weights."""

from typing import Any

import pytest

from deepspeed_compress.backends.announce import joined
from deepspeed_compress.config import CompressConfig

NONE = {"gradients": {"method": "none"}}


def line(**section: Any) -> str:
    return joined(CompressConfig.model_validate({**NONE, **section}), "ZeRO 1", 1, list)


@pytest.mark.parametrize(
    ("activations", "text"),
    [
        ({"tensor": {}}, "; sums of tensor parallelism are merged ("),
        ({"tensor": {"bits": 8}}, "; sums of tensor parallelism are merged and in 8 bits ("),
        ({"tensor": {"merge": False, "bits": 4}}, "; sums of tensor parallelism are in 4 bits ("),
        ({"tensor": {"merge": False, "bits": 4, "backward_bits": 8}}, "parallelism are in 4 bits, 8 backward ("),
        ({"pipeline": {"bits": 4}}, "; activations between stages are in 4 bits ("),
        (
            {"experts": {"dispatch": {"bits": 4}, "combine": {}}},
            "; tokens for experts are in 4 bits; results of experts are in 8 bits (",
        ),
        ({"sequence": {}}, "; all-to-alls of sequence parallelism are in 8 bits ("),
    ],
)
def test_activations_are_named(activations: dict[str, Any], text: str) -> None:
    assert text in line(activations=activations)


def test_nothing_is_claimed_without_them() -> None:
    assert line().endswith("nothing is sent, so nothing is compressed")
