"""Remedies for what users guess who have not read the keys: `"enabled": true`, `"bits": 4`, `"method": "int4"`."""

import json
import re
from collections.abc import Mapping
from typing import Any

from deepspeed_compress.config.methods import DEFAULT_METHOD
from deepspeed_compress.config.models import SECTION
from deepspeed_compress.config.schema import SchemaView, choices
from deepspeed_compress.diagnostics import Path, pointer

_SWITCHES = frozenset({"enable", "enabled", "active", "on"})
_BITS = re.compile(r"(?:u?int|q)?[-_]?(\d+)(?:[-_ ]?bits?)?", re.IGNORECASE)
SYNONYMS: Mapping[str, str] = {
    **dict.fromkeys(("1bit", "1-bit", "onebit", "int1", "signsgd"), "sign"),
    **dict.fromkeys(("fp8", "float8"), "fp8_e4m3"),
    **dict.fromkeys(("low_rank", "lowrank", "svd"), "powersgd"),
}
"""Other names of methods."""


def remedy_of_key(path: Path, value: object, view: SchemaView) -> str | None:
    """Return what to write in place of an unknown key that users expect; None if it is none of these."""
    parent, key = path[:-1], str(path[-1])
    if key in _SWITCHES:
        return _remedy_of_switch(parent, value, view)
    if parent:
        return None
    if key == "method" and (bits := bits_of(("gradients",), value, view)) is not None:
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


def bits_of(path: Path, method: object, view: SchemaView) -> int | None:
    """Return the bits that a name such as "int4" or "4-bit" means at `path`; None if it means none that are allowed."""
    found = None if isinstance(method, bool) else _BITS.fullmatch(str(method))
    bits = int(found[1]) if found else None
    return bits if bits in choices(view.at((*path, "bits"))) else None


def settings_of(path: Path, value: object, view: SchemaView) -> dict[str, Any] | None:
    """Return the object that is meant by a number of bits or the name of a method in its place; None if unknown."""
    bits = bits_of(path, value, view)
    if bits is not None:
        return {"bits": bits}
    name = SYNONYMS.get(value, value) if isinstance(value, str) else None
    return {"method": name} if name in choices(view.at((*path, "method"))) else None
