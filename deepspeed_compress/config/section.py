"""The section in force: preset, validation, the table of all checks, all problems at once, and DeepSpeed's own keys."""

import copy
import difflib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import ValidationError

from deepspeed_compress.config import gradient_problems, layout_problems, policy_problems, service_problems
from deepspeed_compress.config.models import SECTION, CompressConfig, Parallelism
from deepspeed_compress.config.problems import (
    NATIVE_KEYS,
    STAGE,
    TENSOR,
    Check,
    Configuration,
    problem,
    raise_problems,
    show,
    value_at,
)
from deepspeed_compress.config.schedules import merged_places
from deepspeed_compress.config.validation_errors import translate
from deepspeed_compress.diagnostics import Diagnostic, Path, at, pointer
from deepspeed_compress.errors import CompressWarning

Kind = Literal["section", "parallelism", "file", "unsupported", "notice"]

CHECKS: Mapping[Kind, tuple[Check, ...]] = {
    # Errors that the section alone shows.
    "section": (
        gradient_problems.delayed_without_feedback,
        gradient_problems.group_beyond_block,
        policy_problems.schedule,
        policy_problems.adaptive_choice,
        policy_problems.auto_comparison,
        service_problems.islands_within_section,
        layout_problems.sharding_within_section,
        layout_problems.idle_activations,
        service_problems.rate_limit,
        service_problems.checkpoints,
        service_problems.rollout,
    ),
    # Contradictions of the parallelism with DeepSpeed's keys, DeepSpeed's rules, or the number of ranks.
    "parallelism": (layout_problems.disagreement, layout_problems.pipeline, layout_problems.world_size),
    # Other contradictions with the rest of the file, or with the number of ranks.
    "file": (
        layout_problems.weights,
        gradient_problems.second_momentum,
        gradient_problems.uneven_nodes,
        policy_problems.unknown_length,
        policy_problems.empty_choice,
        policy_problems.guard_without_norms,
        layout_problems.ownership,
        service_problems.islands_within_file,
        layout_problems.sharding_within_file,
        layout_problems.activations_within_file,
    ),
    # Features of DeepSpeed that cannot be compressed.
    "unsupported": (layout_problems.features, layout_problems.scaler_without_zero),
    # Settings that are valid, but have no effect or diverge.
    "notice": (
        gradient_problems.feedback,
        gradient_problems.overrides,
        policy_problems.idle_policy,
        service_problems.idle_weights,
        service_problems.idle_rollout,
    ),
}


def find(kind: Kind, configuration: Configuration) -> Iterator[Diagnostic]:
    """Yield what the checks of a kind find."""
    for check in CHECKS[kind]:
        yield from check(configuration)


def find_notices(section: CompressConfig) -> list[Diagnostic]:
    """Return the settings of `section` without effect; empty for the defaults."""
    return list(find("notice", Configuration(section)))


def parse_section(ds_config: Mapping[str, Any]) -> CompressConfig:
    """Validate `ds_config["deepspeed_compress"]`.

    Issues a CompressWarning for every setting without effect.

    Raises:
        ConfigError: listing every problem: unknown keys, wrong values, "auto", keys that are not available in this
            version, and settings that contradict each other.
    """
    section, problems = _validated(ds_config)
    if section is None:
        raise_problems(problems)
    for notice in find_notices(section):
        warnings.warn(str(notice), CompressWarning, stacklevel=2)
    return section


def find_problems(ds_config: Mapping[str, Any], world_size: int | None = None) -> list[Diagnostic]:
    """Return all problems of the section, and of its agreement with the rest of the file.

    With `world_size` (the total number of ranks), also check whether the parallelism divides it. Raises nothing.
    """
    return [problem for problems in problems_by_kind(ds_config, world_size).values() for problem in problems]


def problems_by_kind(ds_config: Mapping[str, Any], world_size: int | None = None) -> dict[Kind, list[Diagnostic]]:
    """Return the problems that `find_problems` finds, by what they contradict (see `CHECKS`)."""
    section, own = _validated(ds_config)
    if section is None:
        return {"section": own}
    configuration = Configuration(section, ds_config, world_size)
    kinds: tuple[Kind, ...] = ("parallelism", "file", "unsupported")
    return {"section": own, **{kind: list(find(kind, configuration)) for kind in kinds}}


def _validated(ds_config: Mapping[str, Any]) -> tuple[CompressConfig | None, list[Diagnostic]]:
    """Return the section, or None and its problems."""
    missing = find_missing(ds_config)
    if missing is not None:
        return None, [missing]
    raw = with_preset(ds_config)
    problems, section = list(_auto_values(raw, ())), None
    try:
        section = CompressConfig.model_validate(raw)
        problems += _patch_problems(section) or find("section", Configuration(section))
    except ValidationError as error:
        # What lies at or below a place already reported is left out.
        places = [found.pointer for found in problems]
        others = translate(error, raw)
        problems += [p for p in others if not any(f"{p.pointer}/".startswith(f"{place}/") for place in places)]
    return None if problems else section, sorted(problems, key=lambda found: found.pointer)


_WEIGHT_BITS = {1: 4, 2: 4, 3: 8}
"""Bits of weights by ZeRO stage. Their losses have been measured: see `docs/results.md`."""


def with_preset(ds_config: Mapping[str, Any]) -> Any:
    """Return the section of `ds_config` with the values of its preset, and without the key itself.

    A section that is no object, or has another preset than "auto", is returned as it is; validation reports it.
    """
    section = ds_config.get(SECTION)
    if not isinstance(section, Mapping) or section.get("preset") != "auto":
        return section
    written = {key: value for key, value in section.items() if key != "preset"}
    return {"auto": {}, "gradients": {"bits": 4}, **_weights(ds_config, written), **written}


def _weights(ds_config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the setting of weights: none if this stage gathers none that can be compressed."""
    parallelism = section.get("parallelism")
    parallelism = parallelism if isinstance(parallelism, Mapping) else {}
    stage = parallelism.get("zero_stage")
    if not isinstance(stage, int):
        stage = STAGE.effective(ds_config, Parallelism())
    apart = parallelism.get("shard_within") or parallelism.get("pipeline", 1) != 1
    bits = None if apart or (stage == 3 and layout_problems.gathers_by_itself(ds_config)) else _WEIGHT_BITS.get(stage)
    return {} if bits is None else {"weights": {"bits": bits}}


_AUTO = '"auto" is not accepted in this section (allowed: a value): no program fills it in, and Accelerate refuses it'


def _auto_values(value: object, path: Path) -> Iterator[Diagnostic]:
    """Yield a problem for every scalar "auto" in `value`, the part of a raw section at `path`."""
    if value == "auto":
        yield problem(path, _AUTO, "nothing: leave the key out for its default" if path else '{"preset": "auto"}')
    if isinstance(value, dict):
        items: list[tuple[str | int, object]] = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list | tuple) else []
    for key, child in items:
        yield from _auto_values(child, (*path, key))


def _patch_problems(section: CompressConfig) -> list[Diagnostic]:
    """Return problems in settings that temporarily replace the written ones, each at its own place."""
    problems = []
    for path, key, settings in merged_places(section):
        raw = {key: settings}
        try:
            CompressConfig.model_validate(raw)
        except ValidationError as error:
            for found in translate(error, raw):
                place = at(SECTION, *path, *found.place.path[len((SECTION, key)) :])
                problems.append(replace(found, place=place))
    return problems


def find_missing(ds_config: Mapping[str, Any]) -> Diagnostic | None:
    """Return a diagnostic for a missing section, with the likely typo; None if there is a section."""
    if SECTION in ds_config:
        return None
    meant = _meant(ds_config, 0.6)
    if meant:
        what = f"the section is missing (found {show(meant[0])} instead)"
        return problem((), what, f'"{SECTION}" in the file\'s outermost object, in place of {show(meant[0])}')
    return problem((), "the section is missing", f'"{SECTION}": {{}} for the defaults, in the file\'s outermost object')


def is_misspelled(ds_config: Mapping[str, Any]) -> bool:
    """Return True if there is no section, but an obvious typo of it, or a section inside another one."""
    return SECTION not in ds_config and bool(_meant(ds_config, 0.8))


def _meant(ds_config: Mapping[str, Any], likeness: float) -> list[str]:
    """Return the key that resembles the section's by at least `likeness` (1: equal), and sections inside other keys."""
    inside = [f"{key}/{SECTION}" for key, value in ds_config.items() if isinstance(value, dict) and SECTION in value]
    return [*difflib.get_close_matches(SECTION, map(str, ds_config), n=1, cutoff=likeness), *inside]


def expand(ds_config: Mapping[str, Any], section: CompressConfig) -> dict[str, Any]:
    """Return a copy of `ds_config` with the section's parallelism in DeepSpeed's own keys.

    The section itself stays.

    Raises:
        ConfigError: if a value given in both places differs, if pipeline parallelism is combined with ZeRO stage 2 or
            3, or if a method contradicts the rest of the file (see `section.CHECKS`).
    """
    configuration = Configuration(section, ds_config)
    problems = [*find("parallelism", configuration), *find("file", configuration)]
    if problems:
        raise_problems(problems)
    expanded = copy.deepcopy(dict(ds_config))
    # DeepSpeed would treat a size of 1 as tensor parallelism, and a pipeline as a plain model.
    uses_autotp = configuration.parallelism.tensor > 1 and configuration.parallelism.pipeline == 1
    for native in NATIVE_KEYS:
        value = native.given(configuration.parallelism)
        if value is not None and (native is not TENSOR or uses_autotp):
            expanded.setdefault(native.section, {})[native.key] = value
    if _may_overlap(expanded, section):
        expanded["zero_optimization"].setdefault("overlap_comm", True)
    return expanded


def _may_overlap(ds_config: Mapping[str, Any], section: CompressConfig) -> bool:
    """Return True if DeepSpeed's streams can reduce during backward and every program stays correct.

    Not under ZeRO 1: there `overlap_comm` reduces only what the last micro-step has gradients of, each once.
    """
    zero, pipeline = ds_config.get("zero_optimization"), (section.parallelism or Parallelism()).pipeline
    return (
        section.gradients.method != "none"
        and isinstance(zero, dict)
        and STAGE.effective(ds_config, Parallelism()) == 2
        and zero.get("contiguous_gradients", True) is True
        and pipeline == 1
        and value_at(zero, ("offload_optimizer", "device")) in (None, "none")
        and ds_config.get("managed_gradient_accumulation", True) is True
    )


def check_world(section: CompressConfig, world_size: int, ds_config: Mapping[str, Any] | None = None) -> int:
    """Return the data-parallel size of `world_size` ranks.

    DeepSpeed's own tensor-parallel size in `ds_config` is used if the section gives none. Issues a CompressWarning if
    one rank remains, which has nothing to exchange.

    Raises:
        ConfigError: if tensor x pipeline does not divide `world_size`.
    """
    configuration = Configuration(section, ds_config or {}, world_size)
    parallelism, problems = configuration.parallelism, list(layout_problems.world_size(configuration))
    if problems:
        raise_problems(problems)
    size = world_size // (configuration.tensor * parallelism.pipeline)
    if section.islands is not None and section.islands.size is not None:
        size = section.islands.size
    if isinstance(parallelism.shard_within, int):
        # Only nodes exchange what the section compresses.
        size //= parallelism.shard_within
    for key in ("gradients", "weights"):
        if size == 1 and getattr(section, key).method != "none":
            text = f"{pointer((SECTION, key))}: compression has no effect, because the data-parallel size is 1"
            warnings.warn(f'{text}. Write "method": "none", or start more ranks.', CompressWarning, stacklevel=2)
    return size
