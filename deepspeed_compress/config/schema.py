"""The JSON Schema of the section, and questions that error messages ask of it."""

from collections.abc import Iterator
from typing import Any

from deepspeed_compress.config.models import DEFAULT_METHOD, CompressConfig
from deepspeed_compress.config.problems import Path, listed, show

Node = dict[str, Any]


def json_schema() -> Node:
    """JSON Schema (draft 2020-12) of the section, with descriptions, defaults and allowed values."""
    schema = CompressConfig.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


class SchemaView:
    """The schema as seen by one section: unions resolve to the variant that its `method` chooses."""

    def __init__(self, section: object) -> None:
        self._schema = json_schema()
        self._section = section

    def at(self, path: Path) -> Node:
        """The schema of the value at `path`, references resolved; {} where there is none."""
        node, value = self._resolve(self._schema), self._section
        for part in path:
            node = self._child(node, part, value)
            value = value.get(part) if isinstance(value, dict) else None
        return node

    def keys(self, path: Path) -> list[str]:
        """The keys that the object at `path` may have."""
        return sorted(self._variant(self.at(path), _value_at(self._section, path)).get("properties", {}))

    def places(self, key: str) -> Iterator[tuple[Path, str | None]]:
        """Every place of the section that may hold `key`, with the method that it belongs to."""
        yield from self._places(key, self._resolve(self._schema), ())

    def _places(self, key: str, node: Node, path: Path) -> Iterator[tuple[Path, str | None]]:
        for method, variant in self._variants(node):
            for name, child in variant.get("properties", {}).items():
                if name == key:
                    yield (*path, name), method
                yield from self._places(key, self._resolve(child), (*path, name))

    def _child(self, node: Node, part: str | int, value: object) -> Node:
        if isinstance(part, int):
            return self._resolve(node.get("items", {}))
        if part == "method" and "discriminator" in node:
            return {"enum": list(node["discriminator"]["mapping"]), "default": DEFAULT_METHOD}
        return self._resolve(self._variant(node, value).get("properties", {}).get(part, {}))

    def _variants(self, node: Node) -> Iterator[tuple[str | None, Node]]:
        mapping = node.get("discriminator", {}).get("mapping")
        if mapping is None:
            yield None, node
            return
        for method, reference in mapping.items():
            yield method, self._resolve({"$ref": reference})

    def _variant(self, node: Node, value: object) -> Node:
        variants = dict(self._variants(node))
        method = value.get("method") if isinstance(value, dict) else None
        known = isinstance(method, str) and method in variants
        return variants[method if known else DEFAULT_METHOD] if len(variants) > 1 else node

    def _resolve(self, node: Node) -> Node:
        """Follow `$ref`, and take what is not null of an optional value; siblings such as defaults win."""
        if "$ref" in node:
            target = self._schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
            return self._resolve({**target, **{k: v for k, v in node.items() if k != "$ref"}})
        if "anyOf" in node:
            value = next(option for option in node["anyOf"] if option.get("type") != "null")
            return self._resolve({**value, **{k: v for k, v in node.items() if k != "anyOf"}, "nullable": True})
        return node


def _value_at(value: object, path: Path) -> object:
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def choices(node: Node) -> list[Any]:
    """The values that a schema lists one by one, else []."""
    return list(node.get("enum", [node["const"]] if "const" in node else []))


def describe(node: Node) -> str:
    """What a schema allows, in words."""
    values = choices(node)
    text = listed(values) if values else _TYPES.get(node.get("type", "object"), "an object") + _range(node)
    return text + (" or null" if node.get("nullable") else "")


_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string that is not empty",
    "array": "a list",
    "object": "an object",
}
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "from", "maximum": "up to", "exclusiveMaximum": "below"}


def _range(node: Node) -> str:
    if "properties" in node:
        return f" with the keys {listed(sorted(node['properties']))}"
    if node.get("format") == "regex":
        return ", a valid Python regular expression"
    bounds = [f"{word} {show(node[bound])}" for bound, word in _BOUNDS.items() if bound in node]
    return " " + " ".join(bounds) if bounds else ""
