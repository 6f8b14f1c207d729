"""Settings that temporarily replace the chosen ones: keys that differ, merged into the others."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args

from pydantic import TypeAdapter

from deepspeed_compress.config.methods import ValuesConfig
from deepspeed_compress.config.overrides import Override
from deepspeed_compress.config.places import CompressedWeights, GradientsConfig, WeightsConfig
from deepspeed_compress.config.sparse_methods import SparseConfig

_FIELDS: Mapping[str, frozenset[str]] = {
    method: frozenset(model.model_fields)
    for model in get_args(get_args(GradientsConfig)[0])
    for method in get_args(model.model_fields["method"].annotation)
}
"""Keys of every method."""
_SHARED = frozenset({"overrides", "min_numel", "chunk_bytes", "hierarchy", "error_feedback", "rotation"})
"""Keys that are kept when the method changes, if the new method has them."""
_SHARED_BY_WEIGHTS = frozenset({"min_numel", "overlap", "frozen"})
"""The same for weights; uncompressed weights have none of them."""
_SHOWN = ("bits", "levels", "density", "rank")
_IMPLIED: Mapping[str, Mapping[str, int]] = {"sign": {"levels": 2}}
"""Values that the name of a method already implies."""


def patched(gradients: GradientsConfig, patch: Mapping[str, Any]) -> GradientsConfig:
    """Return `gradients` with the keys of `patch` in place of its own. Raises pydantic's ValidationError."""
    return _adapter().validate_python(merged(gradients, patch)) if patch else gradients


def patched_weights(weights: WeightsConfig, patch: Mapping[str, Any]) -> WeightsConfig:
    """Return `weights` with the keys of `patch` in place of its own. Raises pydantic's ValidationError."""
    return weights_of(_merged_weights(weights, patch))


def written(settings: GradientsConfig | Override | WeightsConfig) -> dict[str, Any]:
    """Return settings of gradients, of an override, or of weights as a section would contain them."""
    return {"method": settings.method, **settings.model_dump(mode="json", exclude_unset=True)}


def settings_of(text: Mapping[str, Any]) -> GradientsConfig:
    """Return the settings of gradients from the result of `written`. Raises pydantic's ValidationError."""
    return _adapter().validate_python(text)


def weights_of(text: Mapping[str, Any]) -> WeightsConfig:
    """Return the settings of weights from the result of `written`. Raises pydantic's ValidationError."""
    return _weights_adapter().validate_python(text)


@cache
def _weights_adapter() -> TypeAdapter[WeightsConfig]:
    return TypeAdapter(WeightsConfig)


@cache
def _adapter() -> TypeAdapter[GradientsConfig]:
    """Return the adapter of gradient settings. It is built on first use, because the linter starts without it."""
    return TypeAdapter(GradientsConfig)


def merged(gradients: GradientsConfig, patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return `gradients` with `patch` as they would be written, not validated."""
    kept = written(gradients)
    method = patch.get("method", gradients.method)
    if method != gradients.method:
        known = _FIELDS.get(method, _SHARED) if isinstance(method, str) else _SHARED
        kept = {key: value for key, value in kept.items() if key in _SHARED & known}
    return {**kept, **patch}


def _merged_weights(weights: WeightsConfig, patch: Mapping[str, Any]) -> dict[str, Any]:
    kept, method = written(weights), patch.get("method", weights.method)
    if method != weights.method:
        shared = _SHARED_BY_WEIGHTS if method != "none" else frozenset()
        kept = {key: value for key, value in kept.items() if key in shared}
    return {**kept, **patch}


def merged_places(section: Any) -> Iterator[tuple[tuple[str | int, ...], str, dict[str, Any]]]:
    """Yield every patch in `section`: its place, the key that it patches, and the merged settings, not validated."""
    for path, patch in patch_places(section):
        yield path, "gradients", merged(section.gradients, patch)
    for path, patch in weight_places(section) if isinstance(section.weights, CompressedWeights) else ():
        yield path, "weights", _merged_weights(section.weights, patch)


def weight_places(section: Any) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """Yield every non-empty patch of weights in `section`, with its place."""
    for index, phase in enumerate(section.schedule.phases):
        if phase.weights:
            yield ("schedule", "phases", index, "weights"), phase.weights
    for index, patch in enumerate((section.adaptive.weights or ()) if section.adaptive else ()):
        if patch:
            yield ("adaptive", "weights", index), patch


def patch_places(section: Any) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """Yield every patch of gradients in `section`, with its place."""
    schedule = section.schedule
    for index, stage in enumerate((schedule.ramp.stages or ()) if schedule.ramp else ()):
        yield ("schedule", "ramp", "stages", index), stage
    for index, phase in enumerate(schedule.phases):
        yield ("schedule", "phases", index, "gradients"), phase.gradients
    for index, candidate in enumerate((section.adaptive.candidates or ()) if section.adaptive else ()):
        yield ("adaptive", "candidates", index), candidate


def brief(settings: GradientsConfig | WeightsConfig | ValuesConfig) -> str:
    """Return a method and its most important keys: "topk density=0.01 values=blockwise bits=4"."""
    known = settings.model_dump(include=set(_SHOWN))
    implied = _IMPLIED.get(settings.method, {})
    parts = [f"{key}={known[key]:.3g}" for key in _SHOWN if key in known and known[key] != implied.get(key)]
    if isinstance(settings, SparseConfig) and settings.values is not None:
        parts.append(f"values={brief(settings.values)}")
    return " ".join([settings.method, *parts])
