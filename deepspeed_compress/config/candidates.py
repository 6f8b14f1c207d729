"""Candidates of an adaptive choice, for gradients and for weights, and the reasons why settings cannot be candidates.

A candidate must be able to replace every other one during a run, and the value of its steps must be known.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from deepspeed_compress.config.models import CompressConfig
from deepspeed_compress.config.places import (
    CompressedGradients,
    CompressedWeights,
    GradientsConfig,
    PowerSGDGradients,
    TopKWeights,
    WeightsConfig,
)
from deepspeed_compress.config.problems import listed
from deepspeed_compress.config.schedules import OWN_MOMENTUM, patched, patched_weights

Patch = Mapping[str, Any]

USUAL: tuple[Patch, ...] = (
    *({"method": "blockwise", "bits": bits} for bits in (8, 4, 3, 2)),
    {"method": "sign"},
    *({"method": "topk", "density": part, "values": {"method": "blockwise", "bits": 4}} for part in (0.1, 0.01)),
)
"""Candidates for gradients if the section has none."""
USUAL_RANKS = (8, 4, 2, 1)
"""PowerSGD ranks that are also candidates, if PowerSGD can alternate with the written settings."""
_SMALL_BLOCKS: Patch = {"block_size": 128, "scale_dtype": "bf16"}
USUAL_WEIGHTS: tuple[Patch, ...] = (
    {"method": "none"},
    *({"method": "blockwise", "bits": bits} for bits in (8, 4, 3)),
    *({"method": "sign", "levels": levels, **_SMALL_BLOCKS} for levels in (3, 2)),
)
"""Candidates for weights if the section has none."""


def gradient_candidates(section: CompressConfig, low_rank: bool = True) -> tuple[GradientsConfig, ...]:
    """Return the written settings, then no compression, then the others; only the written ones if they have a momentum.

    `low_rank` adds PowerSGD to the usual candidates.
    """
    written = section.gradients
    assert section.adaptive is not None
    if written.method in OWN_MOMENTUM:
        return (written,)
    chosen = section.adaptive.candidates
    others = _usual_candidates(written, low_rank) if chosen is None else (patched(written, patch) for patch in chosen)
    return tuple(dict.fromkeys((written, patched(written, {"method": "none"}), *others)))


def _usual_candidates(written: GradientsConfig, low_rank: bool) -> Iterator[GradientsConfig]:
    yield from (patched(written, patch) for patch in USUAL)
    for rank in USUAL_RANKS if low_rank else ():
        try:
            settings = patched(written, {"method": "powersgd", "rank": rank})
        except ValidationError:
            # For example, its residual settings have no decay, and the written ones have one.
            return
        if reason_against(written, settings) is None:
            yield settings


def chooses_weights(section: CompressConfig) -> bool:
    """Return True if the settings of weights may be chosen, provided that weights are sent as differences."""
    weights = section.weights
    return (
        section.adaptive is not None and isinstance(weights, CompressedWeights) and not isinstance(weights, TopKWeights)
    )


def weight_candidates(section: CompressConfig, differences: bool) -> tuple[WeightsConfig, ...]:
    """Return the written settings first, then the others; only the written ones unless weights are `differences`.

    ZeRO 1 and 2 send weights as differences.
    """
    written, adaptive = section.weights, section.adaptive
    if not differences or not chooses_weights(section):
        return (written,)
    assert adaptive is not None
    patches = USUAL_WEIGHTS if adaptive.weights is None else adaptive.weights
    return tuple(dict.fromkeys((written, *(patched_weights(written, patch) for patch in patches))))


NO_FEEDBACK = (
    "without error feedback cannot be a candidate, because its effect on the loss was only measured with it "
    "(allowed: an object)",
    '"error_feedback": {}, or another method',
)


def reason_against(written: GradientsConfig, settings: GradientsConfig) -> tuple[str, str] | None:
    """Return why `settings` cannot alternate with the written ones, and what to write instead; None if they can."""
    if written.method in OWN_MOMENTUM:
        return (
            f'cannot alternate with gradients.method "{written.method}", which needs an optimizer without momentum, '
            "and keeps a momentum in place of a residual (allowed: no candidates; only the settings of weights are "
            "chosen)",
            'no candidates, or "method": "blockwise" in gradients, with an optimizer that has momentum',
        )
    if settings.method in OWN_MOMENTUM:
        what = "cannot be chosen during a run: it needs an optimizer without momentum, and keeps a momentum of its own"
        return (
            f"{what} (allowed: all methods except {listed(sorted(OWN_MOMENTUM))})",
            '"powersgd", whose messages are as small',
        )
    if not isinstance(settings, CompressedGradients) or not isinstance(written, CompressedGradients):
        return None
    if isinstance(settings, PowerSGDGradients) and getattr(written, "hierarchy", None) is not None:
        what = (
            "reduces among all ranks at once, but gradients.hierarchy reduces in two levels (allowed: methods that "
            "support a hierarchy)"
        )
        return what, '"blockwise", or "hierarchy": null in gradients'
    if isinstance(settings, PowerSGDGradients) and settings.error_feedback is None:
        return NO_FEEDBACK
    if (settings.residuals is None) != (written.residuals is None):
        what = (
            "and the method in gradients must both keep residuals or both keep none, or some residuals would never "
            "be sent"
        )
        return f"{what} (allowed: the same for both)", '"error_feedback": {} in gradients, or another method'
    return None
