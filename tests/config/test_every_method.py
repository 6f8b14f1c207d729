"""Every method in every place that allows it."""

import json
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_compress.config import SECTION, CompressConfig, parse_section
from deepspeed_compress.config.schema import json_schema
from deepspeed_compress.config.section import find_problems
from tests.support.properties import properties
from tests.support.sections import (
    EVERY_METHOD,
    GRADIENTS,
    INSIDE,
    OF_GRADIENTS,
    OF_OVERRIDES,
    OF_WEIGHTS,
    QUANTIZERS,
    ROTATIONS,
)

VALIDATOR = jsonschema.Draft202012Validator(json_schema())


def parse(section: object) -> CompressConfig:
    """Return the parsed section. Warnings are errors, as everywhere in the tests."""
    return parse_section({SECTION: section})


def agree(written: object, read: object) -> bool:
    """Return True if all keys and values of `written` are in `read`."""
    if isinstance(written, dict) and isinstance(read, dict):
        return all(agree(value, read[key]) for key, value in written.items())
    if isinstance(written, list) and isinstance(read, list):
        return len(written) == len(read) and all(map(agree, written, read))
    return written == read


@pytest.mark.parametrize("section", EVERY_METHOD)
def test_every_method_parses_at_every_place(section: dict[str, Any]) -> None:
    VALIDATOR.validate(section)
    assert find_problems({"zero_optimization": {"stage": 1}, SECTION: section}) == []
    parsed = parse(section)
    assert parse(json.loads(parsed.model_dump_json())) == parsed
    assert agree(section, json.loads(parsed.model_dump_json()))


@pytest.mark.parametrize("section", GRADIENTS)
def test_the_table_has_every_key_of_every_method(section: dict[str, Any]) -> None:
    gradients = parse(section).gradients
    assert set(section["gradients"]) == set(type(gradients).model_fields)


def variants_of(schema: dict[str, Any], definition: str, key: str) -> set[str]:
    """Return the methods that a key of a definition of the schema may have."""
    node = schema["$defs"][definition]["properties"][key] if definition else schema["properties"][key]
    node = next((option for option in node.get("anyOf", [node]) if option.get("type") != "null"), node)
    return set(node.get("items", node)["discriminator"]["mapping"])


@pytest.mark.parametrize(
    ("definition", "key", "methods"),
    [
        ("", "gradients", OF_GRADIENTS),
        ("", "weights", {"none", *OF_WEIGHTS}),
        ("TopKGradients", "overrides", OF_OVERRIDES),
        ("TopKGradients", "values", QUANTIZERS),
        ("PowerSGDGradients", "factors", QUANTIZERS),
        ("Hierarchy", "inside", INSIDE),
        ("TopKGradients", "rotation", ROTATIONS),
    ],
)
def test_every_place_has_these_methods(definition: str, key: str, methods: Iterable[str]) -> None:
    assert variants_of(json_schema(), definition, key) == set(methods)


SECTIONS = st.sampled_from(sorted(OF_GRADIENTS)).flatmap(
    lambda method: st.sets(st.sampled_from(sorted(OF_GRADIENTS[method]) or ["method"])).map(
        lambda keys: {"method": method, **{key: OF_GRADIENTS[method][key] for key in keys - {"method"}}}
    )
)


@properties
@given(SECTIONS)
def test_written_out_sections_read_back_the_same(gradients: dict[str, Any]) -> None:
    parsed = CompressConfig.model_validate({"gradients": gradients})
    written = json.loads(parsed.model_dump_json())
    assert CompressConfig.model_validate(written) == parsed
    VALIDATOR.validate(written)
