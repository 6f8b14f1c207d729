"""The section in force: its preset, its validation, and all problems at once, each with its place in the file."""

import difflib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from deepspeed_compress.config.checks import Kind, find, find_notices
from deepspeed_compress.config.models import SECTION, CompressConfig, Parallelism
from deepspeed_compress.config.native import STAGE
from deepspeed_compress.config.problems import Configuration, listed, problem, raise_problems, show
from deepspeed_compress.config.schedules import merged_places
from deepspeed_compress.config.unsupported import gathers_by_itself
from deepspeed_compress.config.validation_errors import translate
from deepspeed_compress.diagnostics import Diagnostic, Path, at, pointer
from deepspeed_compress.errors import CompressWarning


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
    """Return the problems that `find_problems` finds, by what they contradict (see `checks`)."""
    section, own = _validated(ds_config)
    kinds: tuple[Kind, ...] = ("parallelism", "file", "unsupported")
    if section is None:
        section, kinds = _valid_part(with_preset(ds_config), own)
    configuration = Configuration(section, ds_config, world_size)
    return {"section": own, **{kind: list(find(kind, configuration)) for kind in kinds}}


def _valid_part(raw: object, problems: list[Diagnostic]) -> tuple[CompressConfig, tuple[Kind, ...]]:
    """Return the defaults with the parallelism of an invalid section, if that is valid, and what to check them for."""
    if not isinstance(raw, dict):
        return CompressConfig(), ()
    if any(problem.pointer.startswith(pointer((SECTION, "parallelism"))) for problem in problems):
        return CompressConfig(), ("unsupported",)
    return CompressConfig(parallelism=raw.get("parallelism")), ("parallelism", "unsupported")


def _validated(ds_config: Mapping[str, Any]) -> tuple[CompressConfig | None, list[Diagnostic]]:
    """Return the section, or None and its problems."""
    if SECTION not in ds_config:
        return None, [_missing_section(ds_config)]
    raw = with_preset(ds_config)
    problems, section = list(_auto_values(raw, ())), None
    try:
        section = CompressConfig.model_validate(raw)
        problems += _patch_problems(section) or find("section", Configuration(section))
    except ValidationError as error:
        problems += _outside_reported_places(problems, translate(error, raw))
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
    bits = None if apart or (stage == 3 and gathers_by_itself(ds_config)) else _WEIGHT_BITS.get(stage)
    return {} if bits is None else {"weights": {"bits": bits}}


_AUTO = (
    '"auto" is not accepted in this section (allowed: a value), because no program fills it in, and Accelerate '
    "refuses a configuration that contains it"
)


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


def _outside_reported_places(found: list[Diagnostic], others: Iterator[Diagnostic]) -> list[Diagnostic]:
    """Return the problems that do not lie at or below a place already reported."""
    places = [one.pointer for one in found]
    return [p for p in others if not any(f"{p.pointer}/".startswith(f"{place}/") for place in places)]


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
    return None if SECTION in ds_config else _missing_section(ds_config)


def is_misspelled(ds_config: Mapping[str, Any]) -> bool:
    """Return True if there is no section, but an obvious typo of it, or a section inside another one."""
    inside = any(isinstance(value, dict) and SECTION in value for value in ds_config.values())
    close = difflib.get_close_matches(SECTION, map(str, ds_config), n=1, cutoff=0.8)
    return SECTION not in ds_config and (inside or bool(close))


def _missing_section(ds_config: Mapping[str, Any]) -> Diagnostic:
    close = difflib.get_close_matches(SECTION, [str(key) for key in ds_config], n=1)
    inside = [str(key) for key, value in ds_config.items() if isinstance(value, dict) and SECTION in value]
    meant = [*close, *(f"{key}/{SECTION}" for key in inside)]
    what = "the section is missing" + (f" (found {show(meant[0])} instead)" if meant else "")
    parts = [str(key) for key in ds_config if key in CompressConfig.model_fields and isinstance(ds_config[key], dict)]
    if parts and not meant:
        what = f"the section is missing, but the file has keys of it at the top level: {listed(parts)}"
        return problem((), what, f'"{SECTION}": {{...}} around them')
    if close and is_misspelled(ds_config):
        return problem((), what, f'"{SECTION}" in place of {show(close[0])}')
    return problem((), what, f'"{SECTION}": {{}} for the defaults, in the file\'s outermost object')
