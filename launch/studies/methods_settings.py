"""Settings in the table of methods: sections and betas of the optimizer."""

from typing import Any

__all__ = ["ADAM", "BASELINE", "SETTINGS", "WITHOUT_MOMENTUM"]

BASELINE = "none"
ADAM, WITHOUT_MOMENTUM = (0.9, 0.95), (0.0, 0.95)

INT4 = {"method": "blockwise", "bits": 4}
INT2 = {"method": "blockwise", "bits": 2}
INT3 = {"method": "blockwise", "bits": 3, "block_size": 128, "scale_dtype": "bf16"}
SIGN = {"method": "sign"}
TERNARY = {"method": "sign", "levels": 3, "block_size": 128, "scale_dtype": "bf16"}
TOP_1 = {"method": "topk", "density": 0.01, "values": INT4}
TOP_10 = {"method": "topk", "density": 0.1, "values": INT4}
DGC_1 = {"method": "dgc", "density": 0.01, "values": INT4}
DEMO_1 = {"method": "demo", "density": 0.01, "momentum": 0.97}
DEMO_98 = {"method": "demo", "density": 0.01, "momentum": 0.98}
POWERSGD_4 = {"method": "powersgd", "rank": 4}
EMBEDDING = {"parameters": "wte", "method": "sign", "block_size": 1024, "spread": True}
"""Override for the token embedding, whose rows are rarely used: late updates work better than dropped ones."""
LARGE_BLOCKS = {"block_size": 1024, "scale_dtype": "bf16"}
FINE_SIGN = {"method": "sign", "block_size": 128}
HADAMARD = {"rotation": {"method": "hadamard"}}
WARM = {"schedule": {"warmup_steps": 20}}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"gradients": {"method": "none"}},
    "bf16": {"gradients": {"method": "bf16"}},
    "fp16": {"gradients": {"method": "fp16"}},
    "fp8-e4m3": {"gradients": {"method": "fp8_e4m3"}},
    "fp8-e5m2": {"gradients": {"method": "fp8_e5m2"}},
    "int8": {"gradients": {"method": "blockwise", "bits": 8}},
    "int4": {"gradients": INT4},
    "int3": {"gradients": INT3},
    "int2": {"gradients": INT2},
    "int4-hadamard": {"gradients": INT4 | HADAMARD},
    "int2-hadamard": {"gradients": INT2 | HADAMARD},
    "int4-residuals-int8": {"gradients": INT4 | {"error_feedback": {"dtype": "int8"}}},
    "linear4": {"gradients": {"method": "linear", "bits": 4}},
    "stochastic-linear8": {"gradients": {"method": "stochastic_linear", "bits": 8}},
    "percentile4": {"gradients": {"method": "percentile", "bits": 4}},
    "qsgd7": {"gradients": {"method": "qsgd", "levels": 7}},
    "sign": {"gradients": SIGN},
    "sign-hadamard": {"gradients": SIGN | HADAMARD},
    "topk-1%": {"gradients": TOP_1, **WARM},
    "topk-1%-cold": {"gradients": TOP_1},
    "topk-10%": {"gradients": TOP_10, **WARM},
    "topk-1%-tensor": {"gradients": TOP_1 | {"scope": "tensor"}, **WARM},
    "topk-1%-threshold": {"gradients": TOP_1 | {"scope": "threshold"}, **WARM},
    "randomk-10%": {"gradients": {"method": "randomk", "density": 0.1, "values": INT4}, **WARM},
    "block-topk-5%": {"gradients": {"method": "block_topk", "density": 0.05, "values": INT4}, **WARM},
    "dgc-1%": {"gradients": DGC_1, **WARM, "betas": WITHOUT_MOMENTUM},
    "demo-1%": {"gradients": DEMO_1, **WARM, "betas": WITHOUT_MOMENTUM},
    "demo-1%-cold": {"gradients": DEMO_1, "betas": WITHOUT_MOMENTUM},
    "demo-1%-late4": {"gradients": DEMO_1 | {"overrides": [EMBEDDING | {"every": 4}]}, "betas": WITHOUT_MOMENTUM},
    "demo-1%-late8": {"gradients": DEMO_1 | {"overrides": [EMBEDDING | {"every": 8}]}, "betas": WITHOUT_MOMENTUM},
    "demo-1%-late8-m.95": {
        "gradients": DEMO_1 | {"momentum": 0.95, "overrides": [EMBEDDING | {"every": 8}]},
        "betas": WITHOUT_MOMENTUM,
    },
    "demo-1%-late8-m.98": {
        "gradients": DEMO_98 | {"overrides": [EMBEDDING | {"every": 8}]},
        "betas": WITHOUT_MOMENTUM,
    },
    "demo-0.7%-late4-m.98": {
        "gradients": DEMO_98 | {"density": 0.0072, "overrides": [EMBEDDING | {"every": 4}]},
        "betas": WITHOUT_MOMENTUM,
    },
    "demo-0.8%-late4-m.98-tile32": {
        "gradients": DEMO_98 | {"tile": 32, "density": 0.0078, "overrides": [EMBEDDING | {"every": 4}]},
        "betas": WITHOUT_MOMENTUM,
    },
    "demo-1%-late8-warm": {
        "gradients": DEMO_1 | {"overrides": [EMBEDDING | {"every": 8}]},
        "betas": WITHOUT_MOMENTUM,
        **WARM,
    },
    "powersgd-4": {"gradients": POWERSGD_4, **WARM},
    "powersgd-8": {"gradients": {"method": "powersgd", "rank": 8}, **WARM},
    "none+int4": {"gradients": {"method": "none"}, "weights": INT4},
    "none+ternary": {"gradients": {"method": "none"}, "weights": TERNARY},
    "int3+ternary": {"gradients": INT3, "weights": TERNARY},
    "int4+int4": {"gradients": INT4, "weights": INT4},
    "int4+int4-large-blocks": {"gradients": INT4 | LARGE_BLOCKS, "weights": INT4 | LARGE_BLOCKS},
    "int4+sign": {"gradients": INT4, "weights": FINE_SIGN},
    "int4+topk-10%": {"gradients": INT4, "weights": TOP_10},
    "sign+sign": {"gradients": SIGN, "weights": FINE_SIGN},
    "topk-1%+int4": {"gradients": TOP_1, "weights": INT4, **WARM},
    "demo-1%+int4": {"gradients": DEMO_1, "weights": INT4, **WARM, "betas": WITHOUT_MOMENTUM},
    "demo-1%-late4+sign": {
        "gradients": DEMO_1 | {"overrides": [EMBEDDING | {"every": 4}]},
        "weights": FINE_SIGN,
        "betas": WITHOUT_MOMENTUM,
    },
    "demo-0.7%-late4-m.95+sign": {
        "gradients": DEMO_1 | {"momentum": 0.95, "density": 0.0072, "overrides": [EMBEDDING | {"every": 4}]},
        "weights": FINE_SIGN,
        "betas": WITHOUT_MOMENTUM,
    },
    "demo-0.7%-late4-m.98+sign": {
        "gradients": DEMO_98 | {"density": 0.0072, "overrides": [EMBEDDING | {"every": 4}]},
        "weights": FINE_SIGN,
        "betas": WITHOUT_MOMENTUM,
    },
    "demo-1%-late8-warm+sign": {
        "gradients": DEMO_1 | {"overrides": [EMBEDDING | {"every": 8}]},
        "weights": FINE_SIGN,
        "betas": WITHOUT_MOMENTUM,
        **WARM,
    },
    "none+sign": {"gradients": {"method": "none"}, "weights": FINE_SIGN},
    "powersgd-4+int4": {"gradients": POWERSGD_4, "weights": INT4, **WARM},
}
"""Sections by name, "GRADIENTS" or "GRADIENTS+WEIGHTS", and AdamW's `betas` if they are not the usual ones.

The values that a sparsifier keeps are sent as int4. "cold" settings have no dense start, unlike other sparse settings.
"late" settings have none either, and send the embedding only in every N-th step. "late-warm" settings have one.
"""
