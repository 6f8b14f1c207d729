"""Changes during training: the settings of a warm-up, a ramp, and phases, and the patches that carry them out.

A patch has keys that temporarily replace those of `gradients` or `weights`, merged into the others.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter

from deepspeed_compress.choice_names import THE_SAME, in_bits
from deepspeed_compress.config.methods import Model, ValuesConfig
from deepspeed_compress.config.overrides import Override
from deepspeed_compress.config.places import BlockwiseGradients, CompressedWeights, GradientsConfig, WeightsConfig
from deepspeed_compress.config.sparse_methods import Density, SparseConfig

OWN_MOMENTUM = frozenset({"dgc", "demo"})
"""Methods that give gradients a momentum before they are sent."""
THIRDS = (0.2, 0.8, 1.0)
"""Ends of three phases that leave out `until`."""
FIXED = ("error_feedback", "hierarchy", "memory")
"""Keys of gradients that are fixed for a whole run."""
FIXED_OF_WEIGHTS = frozenset({"min_numel", "overlap", "frozen"})
"""Keys of weights that are fixed for a whole run, so that they are kept when the method changes."""

Patch = Annotated[dict[str, Any], Field(examples=[{"bits": 8}])]
"""Keys that temporarily replace those of `gradients` or `weights`. If `method` differs, the other keys of the new
method start at their defaults."""


class Ramp(Model):
    """Gradual transition from uncompressed to the chosen settings, after the warm-up."""

    steps: int = Field(ge=1)
    """Length of the ramp in optimizer steps."""
    shape: Literal["linear", "exponential", "cosine"] = "exponential"
    """Curve by which the density falls from `start` to `gradients.density`, in 16 steps: by equal amounts (`linear`),
    by equal factors (`exponential`), or slowly at both ends (`cosine`)."""
    start: Density = 0.25
    """Density at the start of the ramp."""
    stages: Annotated[tuple[Patch, ...], Field(strict=False, min_length=1)] | None = None
    """For methods without a density: objects with the keys of `gradients` to change, each in force for an equal part of
    the steps; null ramps the density."""


class Phase(Model):
    """Part of training with its own settings."""

    until: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of `total_steps` at which the phase ends. The last phase ends at 1.0 by default, and three phases
    without this key end at 0.2, 0.8 and 1.0."""
    gradients: Patch = Field(default={})
    """Keys of `gradients` to change in this phase; `{}` changes none, and `{"method": "none"}` sends uncompressed."""
    weights: Patch = Field(default={})
    """Keys of `weights` to change in this phase, with ZeRO 1 and 2; `{}` changes none."""


class Schedule(Model):
    """Changes of the settings during training.

    Steps are DeepSpeed's `global_steps`, so a resumed run continues them.
    """

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps at the start in which gradients and weights are sent uncompressed. Skipped steps count."""
    ramp: Ramp | None = None
    """Gradual start of compression after the warm-up; null starts with the chosen settings at once."""
    phases: Annotated[tuple[Phase, ...], Field(strict=False)] = ()
    """Different settings for successive parts of training, in their order; `[]` has none."""
    total_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of the whole training, which `phases` need; null uses `scheduler.params.total_num_steps`."""


def phase_ends(schedule: Schedule) -> tuple[float | None, ...]:
    """Return the fraction of training at which each phase ends; None if unknown."""
    ends = [phase.until for phase in schedule.phases]
    if len(ends) == len(THIRDS) and not any(ends):
        return THIRDS
    return tuple(ends[:-1]) + ((1.0 if ends[-1] is None else ends[-1],) if ends else ())


def total_steps(ds_config: Mapping[str, Any], schedule: Schedule) -> int | None:
    """Return the optimizer steps of the whole training, from the section or the scheduler; None if unknown."""
    if schedule.total_steps is not None:
        return schedule.total_steps
    scheduler = ds_config.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    steps = params.get("total_num_steps") if isinstance(params, Mapping) else None
    return int(steps) if isinstance(steps, int | float) and steps >= 1 else None


_FIELDS: Mapping[str, frozenset[str]] = {
    method: frozenset(model.model_fields)
    for model in get_args(get_args(GradientsConfig)[0])
    for method in get_args(model.model_fields["method"].annotation)
}
"""Keys of every method."""
_SHARED = frozenset({"overrides", "min_numel", "chunk_bytes", "hierarchy", "error_feedback", "rotation"})
"""Keys that are kept when the method changes, if the new method has them."""
_SHOWN = ("bits", "levels", "density", "rank")
_IMPLIED: Mapping[str, Mapping[str, int]] = {"sign": {"levels": 2}}
"""Values that the name of a method already implies."""


def patched(gradients: GradientsConfig, patch: Mapping[str, Any]) -> GradientsConfig:
    """Return `gradients` with the keys of `patch` in place of its own. Raises pydantic's ValidationError."""
    return settings_of(merged(gradients, patch)) if patch else gradients


def patched_weights(weights: WeightsConfig, patch: Mapping[str, Any]) -> WeightsConfig:
    """Return `weights` with the keys of `patch` in place of its own. Raises pydantic's ValidationError."""
    return weights_of(_merged_weights(weights, patch))


def written(settings: GradientsConfig | Override | WeightsConfig) -> dict[str, Any]:
    """Return settings of gradients, of an override, or of weights as a section would contain them."""
    return {"method": settings.method, **settings.model_dump(mode="json", exclude_unset=True)}


def settings_of(text: Mapping[str, Any]) -> GradientsConfig:
    """Return the settings of gradients from the result of `written`. Raises pydantic's ValidationError."""
    return _GRADIENTS.validate_python(text)


def weights_of(text: Mapping[str, Any]) -> WeightsConfig:
    """Return the settings of weights from the result of `written`. Raises pydantic's ValidationError."""
    return _WEIGHTS.validate_python(text)


# Built on first use, because the linter starts without them.
_GRADIENTS: TypeAdapter[GradientsConfig] = TypeAdapter(GradientsConfig, config=ConfigDict(defer_build=True))
_WEIGHTS: TypeAdapter[WeightsConfig] = TypeAdapter(WeightsConfig, config=ConfigDict(defer_build=True))


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
        # Uncompressed weights have none of these keys.
        shared = FIXED_OF_WEIGHTS if method != "none" else frozenset()
        kept = {key: value for key, value in kept.items() if key in shared}
    return {**kept, **patch}


def merged_places(section: Any) -> Iterator[tuple[tuple[str | int, ...], str, dict[str, Any]]]:
    """Yield every patch in `section`: its place, the key that it patches, and the merged settings, not validated."""
    for path, patch in patch_places(section, "gradients"):
        yield path, "gradients", merged(section.gradients, patch)
    for path, patch in patch_places(section, "weights") if isinstance(section.weights, CompressedWeights) else ():
        yield path, "weights", _merged_weights(section.weights, patch)


def patch_places(section: Any, key: str) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """Yield every patch of `key`, "gradients" or "weights", in `section`, with its place."""
    schedule, candidates = section.schedule, "candidates" if key == "gradients" else key
    ramp = schedule.ramp if key == "gradients" else None
    for index, stage in enumerate((ramp.stages or ()) if ramp else ()):
        yield ("schedule", "ramp", "stages", index), stage
    for index, phase in enumerate(schedule.phases):
        yield ("schedule", "phases", index, key), getattr(phase, key)
    for index, patch in enumerate(getattr(section.adaptive, candidates, None) or ()):
        yield ("adaptive", candidates, index), patch


def choice_name(gradients: GradientsConfig) -> str:
    """Return the name of the choice to run the same with these settings, as `plan cluster` has it."""
    return in_bits(gradients.bits) if isinstance(gradients, BlockwiseGradients) else f"{THE_SAME}, {brief(gradients)}"


def brief(settings: GradientsConfig | WeightsConfig | ValuesConfig) -> str:
    """Return a method and its most important keys: "topk density=0.01 values=blockwise bits=4"."""
    known = settings.model_dump(include=set(_SHOWN))
    implied = _IMPLIED.get(settings.method, {})
    parts = [f"{key}={known[key]:.3g}" for key in _SHOWN if key in known and known[key] != implied.get(key)]
    if isinstance(settings, SparseConfig) and settings.values is not None:
        parts.append(f"values={brief(settings.values)}")
    return " ".join([settings.method, *parts])
