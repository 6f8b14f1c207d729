"""Sections with every method at every place, each with all of its keys at values other than the defaults."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

Keys = dict[str, dict[str, Any]]
"""Keys of each method, except `method`."""

QUANTIZERS: Keys = {
    "bf16": {},
    "fp16": {},
    "blockwise": {"bits": 2, "block_size": 64, "rounding": "stochastic", "scale_dtype": "bf16"},
    "linear": {"bits": 2, "block_size": 64, "scale_dtype": "fp16"},
    "stochastic_linear": {"bits": 4, "block_size": 64, "scale_dtype": "fp16"},
    "percentile": {"bits": 8, "block_size": 64, "percentile": 99.9, "rounding": "stochastic"},
    "qsgd": {"levels": 127, "block_size": 64},
    "fp8_e4m3": {"block_size": 64},
    "fp8_e5m2": {"block_size": 64},
    "sign": {"block_size": 64, "levels": 3, "scale_dtype": "bf16"},
}
KEPT: dict[str, Any] = {"density": 0.1, "values": {"bits": 4}}
SPARSE: Keys = {
    "topk": {**KEPT, "block_size": 64, "scope": "block", "min_magnitude": 0.5},
    "randomk": {**KEPT, "block_size": 64, "rescale": False},
    "block_topk": {**KEPT, "block_size": 1024, "group": 64},
}
WARMED = {method: {**keys, "density_warmup_steps": 10} for method, keys in SPARSE.items()}
MESSAGES: dict[str, Any] = {
    "overrides": [{"parameters": "bias", "method": "none", "every": 4}],
    "min_numel": 1000,
    "chunk_bytes": 65536,
}
LAYERED: dict[str, Any] = {**MESSAGES, "hierarchy": {"ranks_per_node": 2, "inside": {}}}
FEEDBACK: dict[str, Any] = {
    **LAYERED,
    "error_feedback": {"dtype": "int8", "device": "cpu", "decay": 1.0, "reset_interval": 8},
    "rotation": {"method": "hadamard", "block_size": 64},
}
MEMORY = {"dtype": "fp32", "device": "cpu"}
OF_GRADIENTS: Keys = {
    "none": {},
    **{method: {**keys, **FEEDBACK} for method, keys in {**QUANTIZERS, **WARMED}.items()},
    "dgc": {**WARMED["topk"], **LAYERED, "momentum": 0.5, "nesterov": True, "clip_norm": 1.0, "memory": MEMORY},
    "demo": {**KEPT, **LAYERED, "density_warmup_steps": 10, "momentum": 0.5, "tile": 32, "memory": MEMORY},
    "powersgd": {**MESSAGES, "rank": 2, "factors": {"method": "fp16"}, "error_feedback": MEMORY},
}
OF_OVERRIDES: Keys = {"none": {"every": 2}, **QUANTIZERS, **WARMED}
INSIDE: Keys = {"none": {}, **QUANTIZERS}
ROTATIONS: Keys = {"hadamard": {"block_size": 64}, "dct": {"tile": 16}}
OF_WEIGHTS: Keys = {
    "blockwise": {**QUANTIZERS["blockwise"], "min_numel": 100},
    "sign": {**QUANTIZERS["sign"], "min_numel": 100},
    "topk": {**SPARSE["topk"], "min_numel": 100},
}


def each(name: str, table: Keys, place: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[Any]:
    """Yield test parameters: for every method of `table`, the section with its keys at `place`."""
    for method, keys in table.items():
        yield pytest.param(place({"method": method, **keys}), id=f"{name}-{method}")


GRADIENTS = [*each("gradients", OF_GRADIENTS, lambda found: {"gradients": found})]
EVERY_METHOD = [
    *GRADIENTS,
    *each("overrides", OF_OVERRIDES, lambda found: {"gradients": {"overrides": [{"parameters": "a", **found}]}}),
    *each("values", QUANTIZERS, lambda found: {"gradients": {"method": "topk", "values": found}}),
    *each("factors", QUANTIZERS, lambda found: {"gradients": {"method": "powersgd", "factors": found}}),
    *each("inside", INSIDE, lambda found: {"gradients": {"hierarchy": {"ranks_per_node": 2, "inside": found}}}),
    *each("rotation", ROTATIONS, lambda found: {"gradients": {"rotation": found}}),
    *each("weights", OF_WEIGHTS, lambda found: {"weights": found}),
]
"""A section for every method at every place where it is allowed."""
