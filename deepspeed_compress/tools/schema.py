"""`ds-compress schema`: print the JSON Schema of the section or of a whole file for editors, or a table of the keys.

In the table, each object of the configuration has a table of its keys. If the keys of an object depend on `method`, a
column says which methods have each key. An object that occurs in several places is shown once, and other places link
to it.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config.schema import choices, describe, json_schema
from deepspeed_compress.tools.lint.keys import OUR_SECTION, Key, keys
from deepspeed_compress.tools.lint.values import listed

Node = dict[str, Any]


def run(options: argparse.Namespace) -> int:
    """Print the schema or the keys, or write them to a file. Return the exit code."""
    schema = file_schema if options.file else json_schema
    text = key_page() if options.markdown else json.dumps(schema(), indent=2) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0


def file_schema() -> Node:
    """Return the JSON Schema of a whole DeepSpeed configuration.

    Our section is strict. DeepSpeed's keys are described, and anything may be at them and beside them: Hugging Face and
    DeepSpeed's models take more than one type for most of them, and the linter knows which.
    """
    section = json_schema()
    dialect, definitions = section.pop("$schema"), section.pop("$defs")
    whole: Node = {"description": f"Configuration of DeepSpeed {keys().version}, with the section {OUR_SECTION}."}
    for path, known in sorted(keys().sections.items()):
        holder = whole
        for part in path:
            holder = holder["properties"].setdefault(part, {})
        holder["properties"] = {name: {"description": _described(key)} for name, key in known.keys.items()}
    whole["properties"][OUR_SECTION] = {"$ref": f"#/$defs/{OUR_SECTION}"}
    return {"$schema": dialect, **whole, "type": "object", "$defs": {**definitions, OUR_SECTION: section}}


def _described(key: Key) -> str:
    """Return the type and the choices of a key of DeepSpeed, or the name of the key that replaces it."""
    if key.deprecated:
        return f"Deprecated in favor of {key.deprecated}."
    text = f"DeepSpeed: {' or '.join(key.kinds) or 'any value'}"
    return f"{text} ({listed(key.choices)})." if key.choices else f"{text}."


Variants = Mapping[str | None, Node]

_HEAD = """# Configuration keys

All keys of the section `deepspeed_compress` of `ds_config.json`, with their defaults. The page is generated from the
JSON Schema of the section; `ds-compress schema --markdown` prints it. For examples and explanations, see
[configuration](configuration.md).

A dot separates a key from the object that contains it, and `[]` stands for any item of a list: `monitor.every` is
`{"deepspeed_compress": {"monitor": {"every": 1}}}`. The default of an object lists only the keys that differ from
their own defaults. The column "methods" lists the values of `method` for which a key exists.
"""
_KEYS = "| key | type | default | meaning |\n|---|---|---|---|"
_KEYS_BY_METHOD = "| key | type | default | methods | meaning |\n|---|---|---|---|---|"
_MANY = 5
"""Number of allowed values from which powers of two are shown as a range."""


@dataclass(frozen=True)
class _Object:
    """Object of the configuration.

    Attributes:
        place: Its key, with dots. Empty for the section itself.
        description: Text that introduces its table.
        variants: Schema of the object for each `method`; a single one under None if it has no methods.
        depth: Number of objects around it.
    """

    place: str
    description: str
    variants: Variants
    depth: int

    @property
    def title(self) -> str:
        return self.place or "Top level"

    @property
    def anchor(self) -> str:
        return "".join(letter for letter in self.title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")


class _Page:
    """Walk over the schema that collects each distinct object once."""

    def __init__(self, schema: Node) -> None:
        self._defs: Mapping[str, Node] = schema["$defs"]
        self._known: dict[tuple[str, ...], _Object] = {}
        self.objects: list[_Object] = []
        self._add(_Object("", schema["description"], {None: schema}, 0))

    def _add(self, found: _Object) -> None:
        self.objects.append(found)
        new = []
        for place, child in self._children(found):
            names = self._references(child)
            key = tuple(names.values())
            if names and key not in self._known:
                variants = {method: self._defs[name] for method, name in names.items()}
                text = child.get("description", "") if None not in variants else variants[None]["description"]
                self._known[key] = _Object(place, text, variants, found.depth + 1)
                new.append(self._known[key])
        for inner in new:
            self._add(inner)

    def _children(self, found: _Object) -> Iterator[tuple[str, Node]]:
        for variant in found.variants.values():
            for key, child in variant["properties"].items():
                place = f"{found.place}.{key}".removeprefix(".")
                yield (f"{place}[]" if "items" in child else place), child

    def _references(self, node: Node) -> dict[str | None, str]:
        """Return the names of the objects that a value, or an item of it, can be, by method; {} for plain values."""
        for option in (node, *node.get("anyOf", ()), node.get("items", {})):
            mapping = option.get("discriminator", {}).get("mapping")
            found = mapping or ({None: option["$ref"]} if "$ref" in option else {})
            if found:
                return {method: reference.rpartition("/")[2] for method, reference in found.items()}
        return {}

    def section(self, found: _Object) -> Iterator[str]:
        """Yield the lines of the section of an object."""
        yield f"\n{'#' * min(2 + max(0, found.depth - 1), 4)} {found.title}\n\n{found.description}\n"
        if None not in found.variants:
            yield from _methods(found.variants)
        yield _KEYS if None in found.variants else _KEYS_BY_METHOD
        yield from self._rows(found)

    def _rows(self, found: _Object) -> Iterator[str]:
        """Yield the rows of an object. Methods whose key has the same type, default and meaning share a row."""
        methods: dict[tuple[str, str, str, str], list[str | None]] = {}
        for method, variant in found.variants.items():
            for key, child in variant["properties"].items():
                if key != "method":
                    row = (
                        f"`{found.place}.{key}`".replace("`.", "`"),
                        self._type(child),
                        f"`{self._default(key, variant)}`".replace("`required`", "required"),
                        child["description"].replace("\n", " "),
                    )
                    methods.setdefault(row, []).append(method)
        for (name, kind, default, meaning), having in methods.items():
            shown = () if None in found.variants else (_listed(having, found.variants),)
            yield _row((name, kind, default, *shown, meaning))
        if None not in found.variants:
            yield _row((f"`{found.place}.method`", "string", _method_default(found.variants), "all", "The method."))

    def _type(self, node: Node) -> str:
        known = self._known.get(tuple(self._references(node).values()))
        if known is not None:
            link = f"[`{known.place}`](#{known.anchor})"
            null = " or null" if {"type": "null"} in node.get("anyOf", ()) else ""
            return f"list of objects: {link}" if "items" in node else f"object{null}: {link}"
        if "anyOf" in node:
            return " or ".join(self._type(option) for option in node["anyOf"])
        if node.get("type") == "array":
            return f"list of {_plural(node['items'])}"
        values = choices(node)
        if len(values) >= _MANY and all(isinstance(value, int) for value in values):
            return f"power of two, {values[0]} to {values[-1]}"
        return "null" if node.get("type") == "null" else describe(node).removeprefix("an ").removeprefix("a ")

    def _default(self, key: str, variant: Node) -> str:
        child = variant["properties"][key]
        if key in variant.get("required", ()):
            return "required"
        default, names = child.get("default"), self._references(child)
        if isinstance(default, dict) and names:
            inner = self._defs[names[None if None in names else default["method"]]]
            default = {name: value for name, value in default.items() if _is_written(name, value, inner)}
        return json.dumps(default)


def key_page() -> str:
    """Return the page in Markdown."""
    page = _Page(json_schema())
    return _HEAD + "\n".join(line for found in page.objects for line in page.section(found)) + "\n"


def _plural(node: Node) -> str:
    """Return the name of several values of a plain type, such as "integers from 0"."""
    if node.get("type") == "string":
        return "regular expressions" if node.get("format") == "regex" else "strings"
    kind, _, bounds = describe(node).partition(" ")[2].partition(" ")
    return f"{kind}s {bounds}".rstrip()


def _is_written(key: str, value: object, variant: Node) -> bool:
    """Return True if `value` must be written because it is required or differs from the default of its key."""
    return key in variant.get("required", ()) or value != variant["properties"][key].get("default")


def _method_default(variants: Variants) -> str:
    """Return the default of `method`: the method whose schema does not require the key."""
    optional = [method for method, variant in variants.items() if "method" not in variant.get("required", ())]
    return f"`{json.dumps(optional[0])}`" if optional else "required"


def _methods(variants: Variants) -> Iterator[str]:
    texts: dict[str, list[str]] = {}
    for method, variant in variants.items():
        texts.setdefault(variant["properties"]["method"]["description"].partition(": ")[2], []).append(f"`{method}`")
    yield "| `method` | meaning |\n|---|---|"
    yield from (_row((", ".join(names), text[:1].upper() + text[1:])) for text, names in texts.items())
    yield ""


def _listed(having: Iterable[str | None], variants: Variants) -> str:
    """Return the methods that have a key, as the shorter of two lists: those that have it, or "all but" the others."""
    known = set(having)
    lacking = [f"`{method}`" for method in variants if method not in known]
    if not lacking:
        return "all"
    names = ", ".join(f"`{method}`" for method in variants if method in known)
    return names if len(known) <= len(lacking) else f"all but {', '.join(lacking)}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"
