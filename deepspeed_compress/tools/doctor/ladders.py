"""Softer and stronger gradient settings, as keys to change.

Both functions start from the methods' own ladder (`MethodConfig.softer`). The guard takes small steps from which it can
return (`policy.ladder`). A remedy should be sufficient at once, so sparse and low-rank methods take larger steps here.
"""

from typing import Any

from deepspeed_compress.config import GradientsConfig, PowerSGDGradients
from deepspeed_compress.config.methods import BlockwiseConfig, LinearConfig, PercentileConfig
from deepspeed_compress.config.places import NoneGradients
from deepspeed_compress.config.sparse_methods import RandomKConfig, SparseConfig

Patch = dict[str, Any]

BLOCKS = frozenset({"blockwise", "linear", "stochastic_linear", "percentile", "fp8_e4m3", "fp8_e5m2", "sign", "qsgd"})
"""Methods that encode each block independently, in a single pass over memory."""
_FORGETFUL = frozenset({"sign", "topk", "block_topk", "randomk", "powersgd"})
_DENSE_ENOUGH = 0.1
"""With density d, gradients arrive about 1/d steps late: 10 steps here, over which Adam's first moment averages."""
_FOUR_BITS: Patch = {"method": "blockwise", "bits": 4}


def forgets(gradients: GradientsConfig) -> bool:
    """Return True if a method that sends only a small part of the gradient discards the rest for good."""
    if isinstance(gradients, NoneGradients) or (isinstance(gradients, RandomKConfig) and gradients.rescale):
        return False
    return gradients.method in _FORGETFUL and gradients.residuals is None


def softer(gradients: GradientsConfig) -> Patch | None:
    """Return the keys to change so that more of the gradient is sent, or None for method `none`."""
    if isinstance(gradients, NoneGradients):
        return None
    patch: Patch | None = gradients.softer()
    if isinstance(gradients, SparseConfig):
        patch = _FOUR_BITS if gradients.density >= _DENSE_ENOUGH else {"density": _DENSE_ENOUGH}
    elif isinstance(gradients, PowerSGDGradients):
        patch = {"rank": 4 * gradients.rank} if gradients.rank <= 16 else _FOUR_BITS
    return {**(patch or {"method": "none"}), **({"error_feedback": {}} if patch and forgets(gradients) else {})}


def stronger(gradients: GradientsConfig) -> Patch | None:
    """Return the keys to change for fewer bytes at little cost in loss, or None if fewer bytes would cost accuracy."""
    if gradients.method in ("none", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"):
        return {"method": "blockwise"}
    if isinstance(gradients, BlockwiseConfig | LinearConfig | PercentileConfig) and gradients.bits == 8:
        return {"bits": 4}
    return None
