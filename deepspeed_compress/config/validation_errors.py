"""Diagnostics of what pydantic finds wrong in a section: the key, the value, what is allowed, and what to write."""

import difflib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from deepspeed_compress.config.models import SECTION
from deepspeed_compress.config.problems import listed, problem, show
from deepspeed_compress.config.schema import SchemaView, choices, describe
from deepspeed_compress.diagnostics import Diagnostic, Path, at_key


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
    return problem(path, what, _instead(node, detail["input"]))


def _instead(node: dict[str, Any], value: object) -> str:
    texts = {str(choice): choice for choice in choices(node)}
    close = difflib.get_close_matches(value, texts, n=1) if isinstance(value, str) else []
    if close:
        return f"{show(texts[close[0]])}, if you meant that"
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
    return _bad_value((*path, "method"), {**detail, "input": detail["input"]["method"]}, view)


def _missing_key(path: Path, detail: ErrorDetails, view: SchemaView) -> Diagnostic:
    node = view.at(path)
    what = f"the key is missing from {show(detail['input'])} (allowed: {describe(node)})"
    return problem(path, what, f'"{path[-1]}": {_instead(node, None)}')


def _unknown_key(path: Path, detail: ErrorDetails, view: SchemaView) -> Diagnostic:
    keys = view.keys(path[:-1])
    what = f"unknown key, given {show(detail['input'])} (allowed: {listed(keys)})"
    close = difflib.get_close_matches(str(path[-1]), keys, n=1)
    if not close:
        return problem(path, what, "nothing: remove the key")
    found = problem(path, what, f'"{close[0]}", if you meant that')
    return replace(found, place=at_key(SECTION, *path))


def _missing_method(path: Path, detail: ErrorDetails, view: SchemaView) -> Diagnostic:
    given = detail["input"]
    return _missing_key((*path, "method"), detail, view) if isinstance(given, dict) else _bad_value(path, detail, view)


_BUILDERS = {
    "extra_forbidden": _unknown_key,
    "missing": _missing_key,
    "union_tag_invalid": _bad_method,
    "union_tag_not_found": _missing_method,
}
