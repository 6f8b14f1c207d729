"""Settings of `gradients` for every method, suitable for the small model of `jobs`."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

METHODS: Mapping[str, dict[str, Any]] = {
    "bf16": {"method": "bf16"},
    "int8": {"method": "blockwise", "bits": 8, "block_size": 32},
    "int4_stochastic": {"method": "blockwise", "bits": 4, "block_size": 32, "rounding": "stochastic"},
    "int2": {"method": "blockwise", "bits": 2, "block_size": 32},
    "linear": {"method": "linear", "bits": 4, "block_size": 32, "chunk_bytes": 65536},
    "stochastic_linear": {"method": "stochastic_linear", "block_size": 32},
    "percentile": {"method": "percentile", "percentile": 90.0, "block_size": 32},
    "qsgd": {"method": "qsgd", "levels": 7, "block_size": 32},
    "fp8": {"method": "fp8_e4m3", "block_size": 32},
    "sign": {"method": "sign", "block_size": 32, "rotation": {"method": "hadamard", "block_size": 64}},
    "topk": {"method": "topk", "density": 0.1, "block_size": 64},
    "topk_int4": {"method": "topk", "density": 0.1, "scope": "tensor", "values": {"bits": 4}},
    "randomk": {"method": "randomk", "density": 0.2, "block_size": 64},
    "block_topk": {"method": "block_topk", "density": 0.2, "block_size": 64, "group": 8},
    "powersgd": {"method": "powersgd", "rank": 2},
    "no_feedback": {"method": "blockwise", "bits": 8, "error_feedback": None},
    "int8_memory": {
        "bits": 4,
        "block_size": 32,
        "error_feedback": {"dtype": "int8", "decay": 0.9, "device": "cpu"},
    },
    "overrides": {
        "bits": 4,
        "block_size": 32,
        "min_numel": 20,
        "overrides": [
            {"parameters": "^2", "method": "sign", "levels": 3},
            {"parameters": "^4", "method": "none", "every": 2},
        ],
    },
    "spread": {
        "bits": 4,
        "block_size": 32,
        "overrides": [{"parameters": "^2", "method": "sign", "every": 3, "spread": True}],
    },
}
WITHOUT_MOMENTUM: Mapping[str, dict[str, Any]] = {
    "dgc": {"method": "dgc", "density": 0.1, "block_size": 64, "density_warmup_steps": 8},
    "demo": {"method": "demo", "density": 0.1, "tile": 16, "momentum": 0.9},
}
"""Methods that apply a momentum to gradients, for use with an optimizer without momentum."""

NO_MOMENTUM: Mapping[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.0, 0.95], "torch_adam": True}}
}
"""Part of the ds_config with an optimizer without momentum."""


NONE: Mapping[str, Any] = {"gradients": {"method": "none"}}
RAW: Mapping[str, Any] = {"gradients": {"method": "bf16", "overrides": [{"parameters": ".+", "method": "none"}]}}
"""Section that sends every parameter uncompressed through our own exchange."""
BF16: Mapping[str, Any] = {"bf16": {"enabled": True}}
FP32_SUMS: Mapping[str, Any] = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
FP16: Mapping[str, Any] = {
    "fp16": {
        "enabled": True,
        "initial_scale_power": 4,
        "hysteresis": 1,
        "loss_scale_window": 3,
        "min_loss_scale": 1,
    }
}
"""Dynamic loss scale that falls at the first overflow, and grows after three steps without one."""
OFFLOAD: Mapping[str, Any] = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
UNCLIPPED: Mapping[str, Any] = {"gradient_clipping": 0.0}


def by_stage(names: Sequence[str]) -> list[Any]:
    """Return test parameters (ZeRO stage, its share of `names`). Slow tests run all names in all stages."""
    return [
        pytest.param(stage, taken, id=f"{stage}-{label}", marks=marks)
        for label, step, marks in (("share", 8, ()), ("all", 1, pytest.mark.slow))
        for stage in range(4)
        for taken in [names[stage % step :: step]]
    ]
