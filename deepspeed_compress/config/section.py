"""Validation of the section: all problems at once, each with its place in the file."""

import copy
import difflib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deepspeed_compress.config.auto_values import find_auto_values
from deepspeed_compress.config.contradictions import find_contradictions, find_mismatches
from deepspeed_compress.config.expand import find_conflicts
from deepspeed_compress.config.guesses import SYNONYMS, bits_of, remedy_of_key, settings_of
from deepspeed_compress.config.methods import DEFAULT_METHOD
from deepspeed_compress.config.models import SECTION, CompressConfig, Parallelism
from deepspeed_compress.config.notices import find_notices
from deepspeed_compress.config.patches import merged_places
from deepspeed_compress.config.preset import with_preset
from deepspeed_compress.config.problems import listed, problem, raise_problems, show
from deepspeed_compress.config.schema import SchemaView, choices, describe, value_at
from deepspeed_compress.config.unsupported import find_unsupported
from deepspeed_compress.diagnostics import Diagnostic, Path, at, at_key, pointer
from deepspeed_compress.errors import CompressWarning

# Most places that a message names.
_PLACES = 3


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


@dataclass(frozen=True, slots=True)
class SectionProblems:
    """Problems of the section, by what they contradict."""

    own: tuple[Diagnostic, ...] = ()
    """Problems of the section by itself."""
    parallelism: tuple[Diagnostic, ...] = ()
    """Contradictions of the parallelism with DeepSpeed's keys or the number of ranks."""
    file: tuple[Diagnostic, ...] = ()
    """Other contradictions with the rest of the file or the number of ranks."""
    unsupported: tuple[Diagnostic, ...] = ()
    """Features of DeepSpeed that cannot be compressed."""


def find_problems(ds_config: Mapping[str, Any], world_size: int | None = None) -> list[Diagnostic]:
    """Return all problems of the section, and of its agreement with the rest of the file.

    With `world_size` (the total number of ranks), also check whether the parallelism divides it. Raises nothing.
    """
    found = sort_problems(ds_config, world_size)
    return [*found.own, *found.parallelism, *found.file, *found.unsupported]


def sort_problems(ds_config: Mapping[str, Any], world_size: int | None = None) -> SectionProblems:
    """Return the problems that `find_problems` finds, by what they contradict."""
    parsed, own = _validated(ds_config)
    section, prefix = with_preset(ds_config), pointer((SECTION, "parallelism"))
    conflicts: list[Diagnostic] = []
    if isinstance(section, dict) and not any(p.pointer.startswith(prefix) for p in own):
        parallelism = Parallelism.model_validate(section.get("parallelism") or {})
        conflicts = find_conflicts(ds_config, parallelism, world_size)
    mismatches = [] if parsed is None else find_mismatches(ds_config, parsed, world_size)
    unsupported = find_unsupported(ds_config, parsed) if isinstance(section, dict) else []
    return SectionProblems(tuple(own), tuple(conflicts), tuple(mismatches), tuple(unsupported))


def _validated(ds_config: Mapping[str, Any]) -> tuple[CompressConfig | None, list[Diagnostic]]:
    """Return the section, or None and its problems."""
    if SECTION not in ds_config:
        return None, [_missing_section(ds_config)]
    raw = with_preset(ds_config)
    problems, section = list(find_auto_values(raw)), None
    try:
        section = CompressConfig.model_validate(raw)
        problems += _patch_problems(section) or find_contradictions(section)
    except ValidationError as error:
        problems += _outside_reported_places(problems, _translate(error, raw))
    return None if problems else section, sorted(problems, key=lambda found: found.pointer)


def _patch_problems(section: CompressConfig) -> list[Diagnostic]:
    """Return problems in settings that temporarily replace the written ones, each at its own place."""
    problems = []
    for path, key, settings in merged_places(section):
        raw = {key: settings}
        try:
            CompressConfig.model_validate(raw)
        except ValidationError as error:
            for found in _translate(error, raw):
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


def _outside_reported_places(found: list[Diagnostic], others: Iterator[Diagnostic]) -> list[Diagnostic]:
    """Return the problems that do not lie at or below a place already reported."""
    places = [one.pointer for one in found]
    return [p for p in others if not any(f"{p.pointer}/".startswith(f"{place}/") for place in places)]


def _translate(error: ValidationError, raw: object) -> Iterator[Diagnostic]:
    view = SchemaView(raw)
    found = [(_path(detail["loc"], view), detail) for detail in error.errors(include_url=False)]
    seen, around = set[Path](), {path[:-1] for path, _ in found}
    for path, detail in found:
        # A value of a union gets an error for each type; the innermost place is the most specific.
        if "variants" not in view.at(path) or (path not in seen and path not in around):
            yield _diagnostic(path, detail, view)
        seen.add(path)
    for path in [path for path, detail in found if detail["type"] == _BAD_METHOD]:
        yield from _next_to_unknown_method(path, view, raw)


def _next_to_unknown_method(path: Path, view: SchemaView, raw: object) -> Iterator[Diagnostic]:
    """Yield the problems in the object at `path` that it has with the meant method, or with any if that is unknown."""
    corrected: Any = copy.deepcopy(raw)
    holder: Any = value_at(corrected, path)
    first, *others = (_problems_with(corrected, path, holder, one) for one in _meant_methods(path, view, holder))
    for place, diagnostic in first.items():
        if all(place in other for other in others):
            yield diagnostic


def _meant_methods(path: Path, view: SchemaView, holder: Mapping[str, Any]) -> list[Any]:
    """Return the method that is meant at `path`, or all methods, the default one first."""
    node = view.at((*path, "method"))
    nearest = DEFAULT_METHOD if bits_of(path, holder["method"], view) is not None else _nearest(node, holder["method"])
    return [nearest] if nearest is not None else sorted(choices(node), key=lambda method: method != DEFAULT_METHOD)


def _problems_with(
    corrected: Mapping[str, Any], path: Path, holder: dict[str, Any], method: Any
) -> dict[str, Diagnostic]:
    """Return the problems at `path` of a section, by place, if its object there, `holder`, has `method`."""
    holder["method"] = method
    try:
        CompressConfig.model_validate(corrected)
    except ValidationError as error:
        view, length = SchemaView(corrected), len(path)
        found = ((_path(detail["loc"], view), detail) for detail in error.errors(include_url=False))
        inside = [(place, detail) for place, detail in found if place[:length] == path and len(place) > length]
        return {pointer(place): _diagnostic(place, detail, view) for place, detail in inside}
    return {}


def _diagnostic(path: Path, detail: ErrorDetails, view: SchemaView) -> Diagnostic:
    return _BUILDERS.get(detail["type"], _bad_value)(path, detail, view)


def _nearest(node: dict[str, Any], value: object) -> str | int | None:
    """Return the allowed text or number that the text `value` is probably a misspelling of."""
    texts = {str(choice): choice for choice in choices(node)}
    close = difflib.get_close_matches(SYNONYMS.get(value, value), texts, n=1) if isinstance(value, str) else []
    return texts[close[0]] if close else None


def _path(location: Path, view: SchemaView) -> Path:
    """Return the place in the file, without the tags that pydantic inserts after the place of a union."""
    path: Path = ()
    parts = iter(location)
    for part in parts:
        path = (*path, part)
        if view.at(path).keys() & {"discriminator", "variants"}:
            next(parts, None)
    return path


def _bad_value(path: Path, detail: ErrorDetails, view: SchemaView) -> Diagnostic:
    node = view.at(path)
    reason = None if "variants" in node else detail.get("ctx", {}).get("error")
    because = f", {reason}" if reason else ""
    allowed = "" if "(allowed: " in because else f" (allowed: {describe(node)})"
    what = f"{show(detail['input'])} is not accepted{because}{allowed}"
    meant = settings_of(path, detail["input"], view)
    if meant is not None:
        return problem(path, what, show(meant))
    return replace(problem(path, what, _instead(node, detail["input"])), meant=_nearest(node, detail["input"]))


def _instead(node: dict[str, Any], value: object) -> str:
    meant = _nearest(node, value)
    if meant is not None:
        return f"{show(meant)}, if you meant that"
    # A key whose default is no compression has another default inside {}.
    off = node.get("default") == {"method": "none"}
    if (isinstance(node.get("default"), dict) and not off) or (node.get("type") == "object" and "required" not in node):
        return "{} for the defaults"
    if "default" in node:
        return f"an allowed value, or leave the key out for its default {show(node['default'])}"
    least = [node["minimum"]] if "minimum" in node else []
    examples = node.get("examples", choices(node) or least)
    if examples:
        return f"{show(examples[0])}, for instance"
    return "an object with these keys" if "object" in describe(node) else "an allowed value"


def _bad_method(path: Path, detail: ErrorDetails, view: SchemaView) -> Diagnostic:
    method: ErrorDetails = {**detail, "input": detail["input"]["method"]}
    bits = bits_of(path, method["input"], view)
    if bits is not None:
        what = f"{show(method['input'])} is not accepted (allowed: {describe(view.at((*path, 'method')))})"
        return problem((*path, "method"), what, f'"bits": {bits}, in place of "method"')
    return _bad_value((*path, "method"), method, view)


def _missing_key(path: Path, detail: ErrorDetails, view: SchemaView) -> Diagnostic:
    node = view.at(path)
    what = f"the key is missing from {show(detail['input'])} (allowed: {describe(node)})"
    return problem(path, what, f'"{path[-1]}": {_instead(node, None)}')


def _unknown_key(path: Path, detail: ErrorDetails, view: SchemaView) -> Diagnostic:
    keys = view.keys(path[:-1])
    what = f"unknown key, given {show(detail['input'])} (allowed: {listed(keys)})"
    expected = remedy_of_key(path, detail["input"], view)
    if expected is not None:
        return problem(path, what, expected)
    close = difflib.get_close_matches(str(path[-1]), keys, n=1)
    if not close:
        return problem(path, what, _known_places(path, view))
    found = problem(path, what, f'"{close[0]}", if you meant that')
    return replace(found, place=at_key(SECTION, *path), meant=close[0])


def _known_places(path: Path, view: SchemaView) -> str:
    """Return a suggestion for a key that is unknown here, naming the places in which it is known.

    Prefer the same object with other methods; then other places, those inside the object first.
    """
    places = {pointer((SECTION, *found)): _methods(having, lacking) for found, having, lacking in view.places(path)}
    here = pointer((SECTION, *path))
    inside = here.removesuffix(str(path[-1]))
    ordered = sorted(places, key=lambda place: (not place.startswith(inside), place.count("/")))
    chosen = [here] if here in places else ordered[:_PLACES]
    texts = [place + places[place] for place in chosen]
    return f"the key where it applies: {' or '.join(texts)}" if texts else "nothing: remove the key"


def _methods(having: list[str], lacking: list[str]) -> str:
    """Return the methods that have a key, by the shorter list; "" if there is no choice."""
    if not having or not lacking:
        return ""
    return f" (method {listed(having)})" if len(having) <= len(lacking) else f" (any method except {listed(lacking)})"


def _missing_method(path: Path, detail: ErrorDetails, view: SchemaView) -> Diagnostic:
    given = detail["input"]
    return _missing_key((*path, "method"), detail, view) if isinstance(given, dict) else _bad_value(path, detail, view)


_BAD_METHOD = "union_tag_invalid"
_BUILDERS = {
    "extra_forbidden": _unknown_key,
    "missing": _missing_key,
    _BAD_METHOD: _bad_method,
    "union_tag_not_found": _missing_method,
}
