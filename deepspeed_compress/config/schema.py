"""JSON Schema of the section, and the queries that error messages need."""

import ast
import inspect
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core.core_schema import ModelSchema

from deepspeed_compress.config.methods import DEFAULT_METHOD, Model
from deepspeed_compress.config.models import CompressConfig
from deepspeed_compress.config.problems import listed, show, value_at
from deepspeed_compress.diagnostics import Path

Node = dict[str, Any]


def json_schema() -> Node:
    """Return the JSON Schema (draft 2020-12) of the section, with descriptions, defaults and allowed values."""
    schema = CompressConfig.model_json_schema(schema_generator=_Described)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


class _Described(GenerateJsonSchema):
    """Schema generator that describes each key by the text under its field.

    Pydantic could do the same, but would read the sources at every start.
    """

    def model_schema(self, schema: ModelSchema) -> JsonSchemaValue:
        node = super().model_schema(schema)
        texts = {key: text for base in reversed(schema["cls"].__mro__) for key, text in _texts(base).items()}
        for key, child in node["properties"].items():
            child |= {"description": texts[key]} if key in texts else {}
        return node


@cache
def _texts(model: type) -> Node:
    """Return the string below each field that `model` itself defines."""
    if not issubclass(model, Model):
        return {}
    [definition] = ast.parse(dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


# Cached: generating it takes longer than everything else that reading a configuration needs.
_generated = cache(json_schema)


class SchemaView:
    """Schema as seen by one section: unions resolve to the variant that its `method` selects."""

    def __init__(self, section: object) -> None:
        self._section = section

    def at(self, path: Path) -> Node:
        """Return the schema of the value at `path`, with references resolved; {} if there is none."""
        node, value = self._resolve(_generated()), self._section
        for part in path:
            node = self._child(node, part, value)
            value = value_at(value, (part,))
        return node

    def keys(self, path: Path) -> list[str]:
        """Return the keys that the object at `path` may have."""
        return sorted(self._variant(self.at(path), value_at(self._section, path)).get("properties", {}))

    def _child(self, node: Node, part: str | int, value: object) -> Node:
        if isinstance(part, int):
            return self._resolve(node.get("items", {}))
        if part == "method" and "discriminator" in node:
            methods = sorted(node["discriminator"]["mapping"], key=lambda method: (method != "none", method))
            optional = "method" not in self._variant(node, None).get("required", ())
            return {"enum": methods, **({"default": DEFAULT_METHOD} if optional else {})}
        return self._resolve(self._variant(node, value).get("properties", {}).get(part, {}))

    def _variant(self, node: Node, value: object) -> Node:
        mapping = node.get("discriminator", {}).get("mapping")
        if mapping is None:
            return node
        method = value.get("method") if isinstance(value, dict) else None
        known = isinstance(method, str) and method in mapping
        default = mapping.get(DEFAULT_METHOD, next(iter(mapping.values())))
        return self._resolve({"$ref": mapping[method] if known else default})

    def _resolve(self, node: Node) -> Node:
        """Follow `$ref`, and take the non-null option of an optional value; siblings such as defaults win.

        A value of several types gets the keys that any of them has, and all of them as `variants`.
        """
        if "$ref" in node:
            target = _generated()["$defs"][node["$ref"].removeprefix("#/$defs/")]
            return self._resolve({**target, **{k: v for k, v in node.items() if k != "$ref"}})
        if "anyOf" in node:
            variants = [self._resolve(option) for option in node["anyOf"] if option.get("type") != "null"]
            value = {key: found for option in reversed(variants) for key, found in option.items()}
            several = {"variants": variants} if len(variants) > 1 else {}
            own = {key: found for key, found in node.items() if key != "anyOf"}
            return self._resolve({**value, **several, **own, "nullable": len(variants) < len(node["anyOf"])})
        return node


def choices(node: Node) -> list[Any]:
    """Return the values that a schema enumerates, or []."""
    return list(node.get("enum", [node["const"]] if "const" in node else []))


def describe(node: Node) -> str:
    """Describe in words what a schema allows."""
    values = choices(node)
    if "variants" in node:
        text = ", or ".join(describe(variant) for variant in node["variants"])
    else:
        text = listed(values) if values else _TYPES.get(node.get("type", "object"), "an object") + _range(node)
    return text + (" or null" if node.get("nullable") else "")


_TYPES = {
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "array": "a list",
    "object": "an object",
}
_BOUNDS = {"exclusiveMinimum": "above", "minimum": "from", "maximum": "up to", "exclusiveMaximum": "below"}


def _range(node: Node) -> str:
    if "properties" in node:
        return f" with the keys {listed(sorted(node['properties']))}"
    if node.get("format") == "regex":
        return " that is not empty and a valid Python regular expression"
    if node.get("type") == "string":
        return f" such as {listed(node['examples'])}" if "examples" in node else " that is not empty"
    if "minItems" in node:
        return f" of {node['minItems']} or more"
    bounds = [f"{word} {show(node[bound])}" for bound, word in _BOUNDS.items() if bound in node]
    return " " + " ".join(bounds) if bounds else ""
