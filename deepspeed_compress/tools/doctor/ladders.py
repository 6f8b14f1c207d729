"""Settings of gradients that are softer or stronger than the present ones, as keys to change.

A remedy should be enough at once, where the guard goes in small steps from which it can return (`policy.ladder`): both
begin with what settings know of themselves (`MethodConfig.softer`), and sparse and low-rank ones go further here.
"""

from typing import Any

from deepspeed_compress.config import GradientsConfig, NoneGradients, PowerSGDGradients, SparseConfig
from deepspeed_compress.config.methods import BlockwiseConfig, LinearConfig, PercentileConfig, RandomKConfig

__all__ = ["BLOCKS", "forgets", "softer", "stronger"]

Patch = dict[str, Any]

BLOCKS = frozenset({"blockwise", "linear", "stochastic_linear", "percentile", "fp8_e4m3", "fp8_e5m2", "sign", "qsgd"})
"""Methods that encode each block by itself, in one pass over memory."""
_FORGETFUL = frozenset({"sign", "topk", "block_topk", "randomk", "powersgd"})
_DENSE_ENOUGH = 0.1
"""A fraction d of the gradient is sent about 1/d steps late: 10, over which Adam's first moment averages."""
_FOUR_BITS: Patch = {"method": "blockwise", "bits": 4}


def forgets(gradients: GradientsConfig) -> bool:
    """Whether what is not sent is lost for ever, with a method that sends little."""
    if isinstance(gradients, NoneGradients) or (isinstance(gradients, RandomKConfig) and gradients.rescale):
        return False
    return gradients.method in _FORGETFUL and gradients.residuals is None


def softer(gradients: GradientsConfig) -> Patch | None:
    """What to change for less loss; None for method none."""
    if isinstance(gradients, NoneGradients):
        return None
    patch: Patch | None = gradients.softer()
    if isinstance(gradients, SparseConfig):
        patch = _FOUR_BITS if gradients.density >= _DENSE_ENOUGH else {"density": _DENSE_ENOUGH}
    elif isinstance(gradients, PowerSGDGradients):
        patch = {"rank": 4 * gradients.rank} if gradients.rank <= 16 else _FOUR_BITS
    return {**(patch or {"method": "none"}), **({"error_feedback": {}} if patch and forgets(gradients) else {})}


def stronger(gradients: GradientsConfig) -> Patch | None:
    """What to change for fewer bytes at little loss; None where fewer would cost accuracy."""
    if gradients.method in ("none", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"):
        return {"method": "blockwise"}
    if isinstance(gradients, BlockwiseConfig | LinearConfig | PercentileConfig) and gradients.bits == 8:
        return {"bits": 4}
    return None
