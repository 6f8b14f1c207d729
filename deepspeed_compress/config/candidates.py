"""Candidates of an adaptive choice, for gradients and for weights, and the reasons why settings cannot be candidates.

A candidate must be able to replace every other one during a run, and the value of its steps must be known.
"""

from deepspeed_compress.config.models import CompressConfig
from deepspeed_compress.config.places import (
    BlockwiseWeights,
    CompressedGradients,
    GradientsConfig,
    SignWeights,
    WeightsConfig,
)
from deepspeed_compress.config.problems import listed
from deepspeed_compress.config.schedules import OWN_MOMENTUM, Patch, patched, patched_weights

NEVER_CHOSEN = OWN_MOMENTUM | {"powersgd"}
"""Methods that cannot alternate with others."""
USUAL: tuple[Patch, ...] = (
    *({"method": "blockwise", "bits": bits} for bits in (8, 4, 3, 2)),
    {"method": "sign"},
    *({"method": "topk", "density": part, "values": {"method": "blockwise", "bits": 4}} for part in (0.1, 0.01)),
)
"""Candidates for gradients if the section has none."""
_SMALL_BLOCKS: Patch = {"block_size": 128, "scale_dtype": "bf16"}
USUAL_WEIGHTS: tuple[Patch, ...] = (
    {"method": "none"},
    *({"method": "blockwise", "bits": bits} for bits in (8, 4, 3)),
    *({"method": "sign", "levels": levels, **_SMALL_BLOCKS} for levels in (3, 2)),
)
"""Candidates for weights if the section has none."""


def gradient_candidates(section: CompressConfig) -> tuple[GradientsConfig, ...]:
    """Return the written settings, then no compression, then the others.

    Return only the written ones if they have a momentum.
    """
    written = section.gradients
    assert section.adaptive is not None
    if written.method in OWN_MOMENTUM:
        return (written,)
    patches = USUAL if section.adaptive.candidates is None else section.adaptive.candidates
    return tuple(dict.fromkeys(patched(written, patch) for patch in ({}, {"method": "none"}, *patches)))


def weight_candidates(section: CompressConfig, differences: bool) -> tuple[WeightsConfig, ...]:
    """Return the written settings first, then the others; only the written ones unless weights are `differences`.

    ZeRO 1 and 2 send weights as differences.
    """
    written, adaptive = section.weights, section.adaptive
    if not differences or adaptive is None or not isinstance(written, BlockwiseWeights | SignWeights):
        return (written,)
    patches = USUAL_WEIGHTS if adaptive.weights is None else adaptive.weights
    return tuple(dict.fromkeys((written, *(patched_weights(written, patch) for patch in patches))))


def reason_against(written: GradientsConfig, settings: GradientsConfig) -> tuple[str, str] | None:
    """Return why `settings` cannot alternate with the written ones, and what to write instead; None if they can."""
    if written.method in OWN_MOMENTUM:
        what = f'cannot alternate with "{written.method}", which needs an optimizer without momentum (allowed: none)'
        return what, 'no candidates, or "method": "blockwise" in gradients, with an optimizer that has momentum'
    if settings.method in NEVER_CHOSEN:
        what = "cannot be chosen during a run: its momentum, or its factors, cannot be compared with single messages"
        return f"{what} (allowed: all methods except {listed(sorted(NEVER_CHOSEN))})", '"sign", or "topk"'
    if not isinstance(settings, CompressedGradients) or not isinstance(written, CompressedGradients):
        return None
    if (settings.residuals is None) != (written.residuals is None):
        what = "and gradients must both keep residuals or both keep none, or some residuals would never be sent"
        return f"{what} (allowed: the same for both)", '"error_feedback": {} in gradients, or another method'
    return None
