"""Settings of gradients that are softer or stronger than the present ones, as keys to change.

A remedy should be enough at once, where the guard goes in small steps from which it can return (`policy.ladder`).
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["BLOCKS", "forgets", "softer", "stronger"]

Patch = dict[str, Any]

BLOCKS = frozenset({"blockwise", "linear", "stochastic_linear", "percentile", "fp8_e4m3", "fp8_e5m2", "sign", "qsgd"})
"""Methods that encode each block by itself, in one pass over memory."""
_FORGETFUL = frozenset({"sign", "topk", "block_topk", "randomk", "powersgd"})
_DENSE_ENOUGH = 0.1
"""A fraction d of the gradient is sent about 1/d steps late: 10, over which Adam's first moment averages."""


def forgets(gradients: Any) -> bool:
    """Whether what is not sent is lost for ever, with a method that sends little."""
    alone = gradients.method in _FORGETFUL and gradients.error_feedback is None
    return alone and not getattr(gradients, "rescale", False)


def softer(gradients: Any) -> Patch | None:
    """What to change for less loss; None for method none."""
    if gradients.method == "none":
        return None
    patch = next(
        (patch for key, step in _SOFTER.items() if hasattr(gradients, key) and (patch := step(gradients))), None
    )
    return {**(patch or {"method": "none"}), **({"error_feedback": {}} if patch and forgets(gradients) else {})}


def stronger(gradients: Any) -> Patch | None:
    """What to change for fewer bytes at little loss; None where fewer would cost accuracy."""
    if gradients.method in ("none", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"):
        return {"method": "blockwise"}
    return {"bits": 4} if getattr(gradients, "bits", 0) == 8 else None


def _density(gradients: Any) -> Patch:
    dense = gradients.density >= _DENSE_ENOUGH
    return {"method": "blockwise", "bits": 4} if dense else {"density": _DENSE_ENOUGH}


def _bits(gradients: Any) -> Patch | None:
    return {"bits": 2 * gradients.bits} if gradients.bits < 8 else None


def _levels(gradients: Any) -> Patch | None:
    return {"levels": 127} if gradients.levels < 127 else None


def _rank(gradients: Any) -> Patch:
    return {"rank": 4 * gradients.rank} if gradients.rank <= 16 else {"method": "blockwise", "bits": 4}


def _signs(gradients: Any) -> Patch | None:
    return {"method": "blockwise", "bits": 4} if gradients.method == "sign" else None


_SOFTER: Mapping[str, Callable[[Any], Patch | None]] = MappingProxyType(
    {"density": _density, "bits": _bits, "levels": _levels, "rank": _rank, "method": _signs}
)
"""By the key that says how much a method sends."""
