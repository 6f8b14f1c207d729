"""`ds-compress check` and `schema`: the errors and values of a section, and the JSON Schema or a table of all keys."""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deepspeed_compress.config import check_world, parse_section, read_ds_config
from deepspeed_compress.config.schema import choices, describe, json_schema
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.tools.lint.keys import OUR_SECTION, Key, keys
from deepspeed_compress.tools.lint.values import listed

Node = dict[str, Any]


def check(options: argparse.Namespace) -> int:
    """Print the errors, or the section with its defaults as JSON. Return exit code 1 if there are errors, else 0."""
    ds_config = read_ds_config(options.config)
    problems = find_problems(ds_config, options.world_size)
    for problem in problems:
        print(f"error: {problem}")
    if problems:
        print(f"{options.config}: {len(problems)} error{'s' if len(problems) > 1 else ''}")
        return 1
    section = parse_section(ds_config)
    print(json.dumps(section.model_dump(mode="json"), indent=2))
    if options.world_size is not None:
        ranks = check_world(section, options.world_size, ds_config)
        print(f"data-parallel size: {ranks} of {options.world_size} ranks")
    return 0


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


_HEAD = """# Configuration keys

All keys of the section `deepspeed_compress` of `ds_config.json`, with their defaults. The page is generated from the
JSON Schema of the section; `ds-compress schema --markdown` prints it. For examples and explanations, see
[configuration](configuration.md).

A dot separates a key from the object that contains it, and `[]` stands for any item of a list: `monitor.every` is
`{"deepspeed_compress": {"monitor": {"every": 1}}}`. The default of an object lists only the keys that differ from
their own defaults. An object with a `method` has a table for each method. An object that occurs in several places is
shown at the first.
"""
_KEYS = "| key | type | default | meaning |\n|---|---|---|---|"


def key_page() -> str:
    """Return the page in Markdown."""
    schema = json_schema()
    return "\n".join((_HEAD, *_Page(schema["$defs"]).section("Top level", "", schema))) + "\n"


class _Page:
    """Tables of all objects, each at its first place."""

    def __init__(self, defs: Mapping[str, Node]) -> None:
        self._defs = defs
        self._titles: dict[str, str] = {}

    def section(self, title: str, place: str, node: Node) -> Iterator[str]:
        """Yield the lines of the section of an object, and of those inside of it that are new."""
        yield f"\n## {title}\n\n{node['description']}\n\n{_KEYS}"
        new: list[tuple[str, str]] = []
        for key, child in node["properties"].items():
            inside = f"{place}.{key}".removeprefix(".")
            items = f"{inside}[]" if child.get("type") == "array" else inside
            # A value, or an item of it, can be one of several objects.
            names = list(dict.fromkeys(re.findall(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(child))))
            new += [(name, items) for name in names if name not in self._titles]
            for name in names:
                methods = ", ".join(self._methods(name))
                self._titles.setdefault(name, f"{items}: {methods}" if len(names) > 1 else items)
            default = "required" if key in node.get("required", ()) else f"`{self._default(child, names)}`"
            cells = (f"`{inside}`", self._type(child, names), default, child["description"])
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"
        for name, items in new:
            yield from self.section(self._titles[name], items, self._defs[name])

    def _methods(self, name: str) -> list[str]:
        return list(map(str, choices(self._defs[name]["properties"].get("method", {}))))

    def _type(self, node: Node, names: Iterable[str] = ()) -> str:
        links = ", ".join(f"[{self._titles[name]}](#{_anchor(self._titles[name])})" for name in names)
        if links:
            kind = "list of objects" if node.get("type") == "array" else "object"
            return f"{kind}{' or null' if {'type': 'null'} in node.get('anyOf', ()) else ''}: {links}"
        if "anyOf" in node:
            return " or ".join(map(self._type, node["anyOf"]))
        if node.get("type") == "array":
            return f"list of {self._type(node['items'])}"
        return "null" if node.get("type") == "null" else describe(node)

    def _default(self, child: Node, names: Iterable[str]) -> str:
        default = child.get("default")
        if isinstance(default, dict) and names:
            methods = {name: self._methods(name) for name in names}
            meant = next(name for name in names if not methods[name] or default["method"] in methods[name])
            keys_of, needed = self._defs[meant]["properties"], self._defs[meant].get("required", ())
            default = {
                key: value for key, value in default.items() if key in needed or value != keys_of[key].get("default")
            }
        return json.dumps(default)


def _anchor(title: str) -> str:
    return "".join(letter for letter in title.lower().replace(" ", "-") if letter.isalnum() or letter in "-_")
