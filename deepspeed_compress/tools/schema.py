"""`ds-compress schema`: print the JSON Schema of the section or of a whole file for editors, or a table of the keys."""

import argparse
import json
import sys
from typing import Any

from deepspeed_compress.config.schema import json_schema
from deepspeed_compress.tools.key_page import key_page
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
