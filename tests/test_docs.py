"""The documentation agrees with the code: keys, defaults, methods, links, examples and error messages."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.compressors import COMPRESSORS
from deepspeed_compress.config import SECTION, CompressConfig, expand, find_problems, json_schema, parse_section
from deepspeed_compress.config.planned import PLANNED_KEYS, PLANNED_VALUES
from deepspeed_compress.errors import ConfigError

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")

Key = tuple[str, str | None]
"""A key with dots, and its default as JSON: "required" without one, None for an object whose keys have rows."""


def schema_keys(node: dict[str, Any], path: str, defs: dict[str, Any]) -> Iterator[Key]:
    for name, child in node.get("properties", {}).items():
        place = f"{path}.{name}" if path else name
        variants = list(variants_of(child, defs))
        yield place, "required" if name in node.get("required", ()) else default_cell(child, variants)
        for variant in variants:
            yield from schema_keys(variant, f"{place}[]" if child.get("type") == "array" else place, defs)


def default_cell(child: dict[str, Any], variants: list[dict[str, Any]]) -> str | None:
    """What the table must say; None for an object that is always there."""
    always = bool(variants) and child.get("type") != "array" and "anyOf" not in child
    return None if always else json.dumps(child["default"])


def variants_of(node: dict[str, Any], defs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects that a value may be: references, alternatives and list items resolved."""
    if "$ref" in node:
        yield defs[node["$ref"].rpartition("/")[2]]
    for option in [*node.get("anyOf", ()), *node.get("oneOf", ()), *([node["items"]] if "items" in node else ())]:
        yield from variants_of(option, defs)


def documented_keys() -> set[tuple[str, str]]:
    """Key and default cell of every row that has four columns and a key in the first."""
    rows = re.findall(r"^\| `([a-z0-9_.\[\]]+)` \|[^|\n]+\|([^|\n]+)\|.+\|$", CONFIGURATION, re.MULTILINE)
    return {(key, default.strip().strip("`")) for key, default in rows}


def test_every_key_of_the_schema_is_documented_with_its_default() -> None:
    schema = json_schema()
    keys = set(schema_keys(schema, "", schema["$defs"]))
    documented = documented_keys()
    names = {key for key, _ in documented}
    assert {key for key, _ in keys} - names == set(), "not documented"
    assert {key for key, default in keys if default and (key, default) not in documented} == set(), "wrong default"


def test_no_key_is_documented_that_the_schema_lacks() -> None:
    schema = json_schema()
    known = {key for key, _ in schema_keys(schema, "", schema["$defs"])}
    assert {key for key, _ in documented_keys()} - known == set()


@pytest.mark.parametrize("method", COMPRESSORS)
def test_every_method_is_documented(method: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for text in (readme, CONFIGURATION):
        assert re.search(rf"^\| [^|]*`{method}`[^|]*\|", text, re.MULTILINE)


def test_everything_planned_is_listed() -> None:
    chapter = CONFIGURATION.partition("## Planned")[2]
    words = {*re.findall(r'`"?(\w+)"?`', chapter), *COMPRESSORS}
    planned = [*PLANNED_KEYS.values(), *PLANNED_VALUES.values()]
    assert {str(word) for group in planned for word in group} - words == set()


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of `page`, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def snippets(language: str) -> list[Any]:
    found = [(page, match) for page in PAGES for match in FENCE.finditer(page.read_text(encoding="utf-8"))]
    return [pytest.param(m[3], id=f"{page.name}-{m.start()}") for page, m in found if m[2] == language]


def as_ds_config(text: str) -> dict[str, Any]:
    """A snippet as a DeepSpeed configuration: it is one, or it is the section alone."""
    value: dict[str, Any] = json.loads(text)
    alone = SECTION not in value and value.keys() <= CompressConfig.model_fields.keys()
    return {SECTION: value} if alone else value


@pytest.mark.parametrize("text", snippets("json"))
def test_examples_are_valid(text: str) -> None:
    ds_config = as_ds_config(text)
    if SECTION in ds_config:
        expand(ds_config, parse_section(ds_config))
        assert find_problems(ds_config) == []


def error_examples() -> list[Any]:
    """Each invalid snippet and the text block after it."""
    blocks = list(FENCE.finditer(CONFIGURATION))
    pairs = [(a[3], b[3]) for a, b in itertools.pairwise(blocks) if (a[2], b[2]) == ("json invalid", "text")]
    return [pytest.param(*pair, id=str(index)) for index, pair in enumerate(pairs)]


@pytest.mark.parametrize(("text", "message"), error_examples())
def test_error_messages_are_the_real_ones(text: str, message: str) -> None:
    ds_config = as_ds_config(text)
    with pytest.raises(ConfigError) as raised:
        expand(ds_config, parse_section(ds_config))
    assert [line for line in message.splitlines() if line.strip() not in str(raised.value)] == []


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.json")), ids=lambda file: file.stem)
def test_shipped_configurations_are_valid(file: Path) -> None:
    ds_config = json.loads(file.read_text(encoding="utf-8"))
    expand(ds_config, parse_section(ds_config))


def test_the_licence_is_the_whole_apache_text() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text.splitlines()) == 202
