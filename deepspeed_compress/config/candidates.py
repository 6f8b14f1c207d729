"""Candidates of an adaptive choice, for gradients and for weights, and the settings that cannot be candidates.

A candidate must be able to replace every other one during a run, and the value of its steps must be known.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from deepspeed_compress.config.methods import NoCompression
from deepspeed_compress.config.models import CompressConfig, Parallelism
from deepspeed_compress.config.native import STAGE
from deepspeed_compress.config.patches import patched, patched_weights
from deepspeed_compress.config.places import (
    CompressedGradients,
    CompressedWeights,
    GradientsConfig,
    PowerSGDGradients,
    TopKWeights,
    WeightsConfig,
)
from deepspeed_compress.config.problems import listed, problem
from deepspeed_compress.config.schedules import FIXED, OWN_MOMENTUM
from deepspeed_compress.diagnostics import Diagnostic, Path, pointer

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
        if _reason_against(written, settings) is None:
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


def find_adaptive_problems(section: CompressConfig) -> Iterator[Diagnostic]:
    """Yield the settings that `adaptive` of `section` cannot choose from."""
    if section.adaptive is None:
        return
    yield from _gradient_problems(section)
    yield from _weight_problems(section)
    if section.gradients.method == "none":
        what = (
            'cannot be combined with gradients.method "none", which leaves reduction to DeepSpeed (allowed: '
            "another method)"
        )
        yield problem(("adaptive",), what, 'another method in gradients; "none" is always a candidate')
    for key in ("ramp", "phases"):
        if getattr(section.schedule, key):
            what = f"cannot be combined with schedule.{key}, which sets the same keys (allowed: one of the two)"
            yield problem(("adaptive",), what, f"adaptive without schedule.{key}")


def _gradient_problems(section: CompressConfig) -> Iterator[Diagnostic]:
    written, adaptive = section.gradients, section.adaptive
    assert adaptive is not None
    own = written.method in OWN_MOMENTUM
    for index, patch in enumerate(adaptive.candidates or ()):
        # Keys that may not change are reported separately.
        changed = {key: value for key, value in patch.items() if key not in FIXED}
        path, settings = ("adaptive", "candidates", index), patched(written, changed)
        reason = _reason_against_momentum(written) if own else _reason_against(written, settings)
        if reason is not None:
            yield problem((*path, "method"), f'"{settings.method}" {reason[0]}', reason[1])
    unfed = isinstance(written, PowerSGDGradients) and written.error_feedback is None
    if unfed:
        what = f"null cannot be combined with adaptive: PowerSGD {_NO_FEEDBACK[0]}"
        yield problem(("gradients", "error_feedback"), what, _NO_FEEDBACK[1])
    if own and len(weight_candidates(section, differences=True)) == 1:
        yield problem(("adaptive",), *_nothing_to_choose(written.method))


_NO_FEEDBACK = (
    "without error feedback cannot be a candidate, because its effect on the loss was only measured with it "
    "(allowed: an object)",
    '"error_feedback": {}, or another method',
)


def _reason_against_momentum(written: GradientsConfig) -> tuple[str, str]:
    what = f'gradients.method "{written.method}"'
    return (
        f"cannot alternate with {what}, which needs an optimizer without momentum, and keeps a momentum in place of a "
        "residual (allowed: no candidates; only the settings of weights are chosen)",
        'no candidates, or "method": "blockwise" in gradients, with an optimizer that has momentum',
    )


def _reason_against(written: GradientsConfig, settings: GradientsConfig) -> tuple[str, str] | None:
    """Return why `settings` cannot alternate with the written ones, and what to write instead; None if they can."""
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
        return _NO_FEEDBACK
    if (settings.residuals is None) != (written.residuals is None):
        what = (
            "and the method in gradients must both keep residuals or both keep none, or some residuals would never "
            "be sent"
        )
        return f"{what} (allowed: the same for both)", '"error_feedback": {} in gradients, or another method'
    return None


def _weight_problems(section: CompressConfig) -> Iterator[Diagnostic]:
    adaptive, weights = section.adaptive, section.weights
    assert adaptive is not None
    if adaptive.weights is None:
        return
    if not isinstance(weights, CompressedWeights):
        what = (
            'cannot be combined with weights.method "none", which leaves weights to DeepSpeed (allowed: another method)'
        )
        yield problem(("adaptive", "weights"), what, '"weights": {"bits": 4}, and {"method": "none"} as a candidate')
        return
    places: list[tuple[Path, WeightsConfig]] = [(("weights",), section.weights)]
    # An empty patch means that weights stay as they are.
    for index, patch in ((index, patch) for index, patch in enumerate(adaptive.weights) if patch):
        places.append((("adaptive", "weights", index), patched_weights(section.weights, patch)))
    for path, settings in places if any(adaptive.weights) else ():
        if isinstance(settings, TopKWeights):
            what = '"topk" cannot be a candidate, because its effect on the loss depends on how far weights lag behind'
            yield problem((*path, "method"), f"{what} (allowed: none, blockwise, sign)", '"method": "sign"')


def find_empty_choice(ds_config: Mapping[str, Any], section: CompressConfig) -> Iterator[Diagnostic]:
    """Yield what cannot be chosen at the file's ZeRO stage: under ZeRO 3 no rank keeps the weights that it gathers."""
    parallelism, adaptive = section.parallelism or Parallelism(), section.adaptive
    stage, place = STAGE.effective(ds_config, parallelism), pointer(STAGE.place(parallelism))
    if stage != 3 or adaptive is None or isinstance(section.weights, NoCompression):
        return
    if adaptive.weights is not None:
        what = f"cannot be combined with {place}: 3, where weights are rounded instead of sent as differences"
        yield problem(("adaptive", "weights"), f"{what} (allowed: null)", f"null, or 1 or 2 as {place}")
    elif section.gradients.method in OWN_MOMENTUM:
        yield problem(("adaptive",), *_nothing_to_choose(f"{section.gradients.method} under ZeRO 3"))


def _nothing_to_choose(method: str) -> tuple[str, str]:
    what = f'has nothing to choose: "{method}" cannot alternate with other methods, and neither can its weights'
    return f"{what} (allowed: another method, or ZeRO 1 or 2 with blockwise or sign weights)", "no adaptive"
