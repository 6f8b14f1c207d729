"""Diagnostics of what pydantic finds wrong in a section: the key, the value, what is allowed, and what to write.

Remedies also cover what users guess who have not read the keys: `"enabled": true`, `"bits": 4`, `"method": "int4"`.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deepspeed_compress.config.methods import DEFAULT_METHOD
from deepspeed_compress.config.models import SECTION
from deepspeed_compress.config.problems import listed, problem, show
from deepspeed_compress.config.schema import SchemaView, choices, describe
from deepspeed_compress.diagnostics import Diagnostic, Path, at_key, pointer

_PLACES = 3
"""Maximum number of places that a message names."""
_SWITCHES = frozenset({"enable", "enabled", "active", "on"})
_BITS = re.compile(r"(?:u?int|q)?[-_]?(\d{1,2})(?:[-_ ]?bits?)?", re.IGNORECASE)
_SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("1bit", "1-bit", "onebit", "int1", "signsgd"), "sign"),
    **dict.fromkeys(("fp8", "float8"), "fp8_e4m3"),
    **dict.fromkeys(("low_rank", "lowrank", "svd"), "powersgd"),
}
"""Other names of methods."""


def translate(error: ValidationError, raw: object) -> Iterator[Diagnostic]:
    """Yield the diagnostics of what pydantic found wrong in the section `raw`, each at its place in the file.

    An unknown method hides the other problems of its object, because it decides which keys there are.
    """
    view = SchemaView(raw)
    found = [(_path(detail["loc"], view), detail) for detail in error.errors(include_url=False)]
    seen, around = set[Path](), {path[:-1] for path, _ in found}
    for path, detail in found:
        # A value of a union gets an error for each type; the innermost place is the most specific.
        if "variants" not in view.at(path) or (path not in seen and path not in around):
            yield _BUILDERS.get(detail["type"], _bad_value)(path, detail, view)
        seen.add(path)


def _nearest(node: dict[str, Any], value: object) -> str | int | None:
    """Return the allowed text or number that the text `value` is probably a misspelling of."""
    texts = {str(choice): choice for choice in choices(node)}
    close = difflib.get_close_matches(_SYNONYMS.get(value, value), texts, n=1) if isinstance(value, str) else []
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
    meant = _settings_meant(path, detail["input"], view)
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
    bits = _bits_of(path, method["input"], view)
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
    expected = _remedy_of_key(path, detail["input"], view)
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


def _remedy_of_key(path: Path, value: object, view: SchemaView) -> str | None:
    """Return what to write in place of an unknown key that users expect; None if it is none of these."""
    parent, key = path[:-1], str(path[-1])
    if key in _SWITCHES:
        return _remedy_of_switch(parent, value, view)
    if parent:
        return None
    if key == "method" and (bits := _bits_of(("gradients",), value, view)) is not None:
        return f'"gradients": {{"bits": {bits}}}'
    for place, having, _ in view.places(path):
        if place == ("gradients", key):
            method = {} if DEFAULT_METHOD in having or not having else {"method": _usual(having)}
            return f'"gradients": {json.dumps({**method, key: value}, default=repr)}'
    return None


def _usual(methods: list[str]) -> str:
    return "topk" if "topk" in methods else methods[0]


def _remedy_of_switch(parent: Path, value: object, view: SchemaView) -> str:
    if value is not False:
        return f"nothing: remove the key, since {'this' if parent else 'the section'} is on if it is there"
    if not parent:
        return "no section, which turns the package off"
    if "none" in choices(view.at((*parent, "method"))):
        return '"method": "none", which turns this off'
    return f"no {pointer((SECTION, *parent))}, which turns this off"


def _bits_of(path: Path, method: object, view: SchemaView) -> int | None:
    """Return the bits that a name such as "int4" or "4-bit" means at `path`; None if it means none that are allowed."""
    found = None if isinstance(method, bool) else _BITS.fullmatch(str(method))
    bits = int(found[1]) if found else None
    return bits if bits in choices(view.at((*path, "bits"))) else None


def _settings_meant(path: Path, value: object, view: SchemaView) -> dict[str, Any] | None:
    """Return the object that is meant by a number of bits or the name of a method in its place; None if unknown."""
    bits = _bits_of(path, value, view)
    if bits is not None:
        return {"bits": bits}
    name = _SYNONYMS.get(value, value) if isinstance(value, str) else None
    return {"method": name} if name in choices(view.at((*path, "method"))) else None


_BUILDERS = {
    "extra_forbidden": _unknown_key,
    "missing": _missing_key,
    "union_tag_invalid": _bad_method,
    "union_tag_not_found": _missing_method,
}
