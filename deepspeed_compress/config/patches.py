"""Settings of gradients that stand in for the chosen ones for a while: keys that differ, merged into the others."""

from collections.abc import Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, get_args

from pydantic import TypeAdapter

from deepspeed_compress.config.methods import SparseConfig, ValuesConfig
from deepspeed_compress.config.overrides import Override
from deepspeed_compress.config.places import GradientsConfig, WeightsConfig

__all__ = ["brief", "merged", "patch_places", "patched", "settings_of", "written"]

_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        method: frozenset(model.model_fields)
        for model in get_args(get_args(GradientsConfig)[0])
        for method in get_args(model.model_fields["method"].annotation)
    }
)
"""Keys of every method."""
_SHARED = frozenset({"overrides", "min_numel", "chunk_bytes", "hierarchy", "error_feedback", "rotation"})
"""Keys that stay when the method changes, where the new one has them."""
_SHOWN = ("bits", "levels", "density", "rank")
_SAID: Mapping[str, Mapping[str, int]] = MappingProxyType({"sign": {"levels": 2}})
"""What the name of a method says already."""


def patched(gradients: GradientsConfig, patch: Mapping[str, Any]) -> GradientsConfig:
    """`gradients` with the keys of `patch` in place of its own. Raises pydantic's ValidationError."""
    return _adapter().validate_python(merged(gradients, patch)) if patch else gradients


def written(gradients: GradientsConfig | Override) -> dict[str, Any]:
    """`gradients`, or an override of them, as a section would have them."""
    return {"method": gradients.method, **gradients.model_dump(mode="json", exclude_unset=True)}


def settings_of(text: Mapping[str, Any]) -> GradientsConfig:
    """The settings of `gradients` that `written` gave. Raises pydantic's ValidationError."""
    return _adapter().validate_python(text)


@cache
def _adapter() -> TypeAdapter[GradientsConfig]:
    """Made when first needed: the linter starts without."""
    return TypeAdapter(GradientsConfig)


def merged(gradients: GradientsConfig, patch: Mapping[str, Any]) -> dict[str, Any]:
    """The same, as it would be written, and not validated."""
    kept = written(gradients)
    method = patch.get("method", gradients.method)
    if method != gradients.method:
        known = _FIELDS.get(method, _SHARED) if isinstance(method, str) else _SHARED
        kept = {key: value for key, value in kept.items() if key in _SHARED & known}
    return {**kept, **patch}


def patch_places(section: Any) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """Every patch in `section`, with its place."""
    schedule = section.schedule
    for index, stage in enumerate((schedule.ramp.stages or ()) if schedule.ramp else ()):
        yield ("schedule", "ramp", "stages", index), stage
    for index, phase in enumerate(schedule.phases):
        yield ("schedule", "phases", index, "gradients"), phase.gradients
    for index, candidate in enumerate((section.adaptive.candidates or ()) if section.adaptive else ()):
        yield ("adaptive", "candidates", index), candidate


def brief(settings: GradientsConfig | WeightsConfig | ValuesConfig) -> str:
    """A method and what it depends on most: "topk density=0.01 values=blockwise bits=4"."""
    known = settings.model_dump(include=set(_SHOWN))
    said = _SAID.get(settings.method, {})
    parts = [f"{key}={known[key]:.3g}" for key in _SHOWN if key in known and known[key] != said.get(key)]
    if isinstance(settings, SparseConfig) and settings.values is not None:
        parts.append(f"values={brief(settings.values)}")
    return " ".join([settings.method, *parts])
