"""The documentation agrees with the code: keys, defaults, methods, links, examples and error messages."""

import ast
import importlib.util
import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.config import SECTION, CompressConfig, expand, parse_section
from deepspeed_compress.config.schema import json_schema
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.lint.rules import RULES
from launch.studies.methods_settings import SETTINGS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / ".github/SECURITY.md"]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")


def generated_pages() -> dict[Path, str]:
    """Return the pages that the site generates, by the path that links to them use."""
    spec = importlib.util.spec_from_file_location("docs_site_hooks", ROOT / "docs/site/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return {ROOT / "docs" / name: text for name, text in hooks.generated_pages().items()}


GENERATED = generated_pages()
TEXTS = {**{page: page.read_text(encoding="utf-8") for page in PAGES}, **GENERATED}
KEY_PAGE = GENERATED[ROOT / "docs/keys.md"]
RULE_PAGE = GENERATED[ROOT / "docs/rules.md"]
METHODS_PAGE = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


SCHEMA = json_schema()
MODELS: list[dict[str, Any]] = [SCHEMA, *SCHEMA["$defs"].values()]
ALL_METHODS = set(SCHEMA["properties"]["gradients"]["discriminator"]["mapping"])


def key_names(node: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield all keys of an object and of those inside of it, with dots."""
    for name, child in node["properties"].items():
        place = f"{path}.{name}".removeprefix(".")
        yield place
        for inner in set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(child))):
            yield from key_names(SCHEMA["$defs"][inner], f"{place}[]" if child.get("type") == "array" else place)


def test_every_key_of_the_schema_has_a_row_with_its_description() -> None:
    """Every object is shown once, at its first place."""
    lines = [line for line in KEY_PAGE.splitlines() if line.startswith("| `")]
    cells = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    shown = sorted((key.strip("`").rpartition(".")[2], meaning) for key, _, _, meaning in cells)
    keys = [item for model in MODELS for item in model["properties"].items()]
    assert shown == sorted((key, child["description"].replace("\n", " ")) for key, child in keys)


def test_defaults_are_shown_without_what_is_usual_inside() -> None:
    for row in (
        "| `gradients` | object: [gradients: none](#gradients-none), ",
        "| `gradients.bits` | 8, 4, 3, 2 | `8` | Bits per value. |",
        "| `weights` | object: [weights: none](#weights-none), ",
        "| `islands.sync_every` | ",
    ):
        assert f"\n{row}" in KEY_PAGE
    assert " | `{}` | Compression of gradients." in KEY_PAGE
    assert ' | `{"method": "none"}` | Compression of updated weights' in KEY_PAGE


def test_every_rule_is_on_its_page_with_its_examples() -> None:
    sections = re.split(r"^### ", RULE_PAGE, flags=re.MULTILINE)[1:]
    assert [section.partition("\n")[0] for section in sections] == [
        f"{rule.code} {rule.name}" for rule in sorted(RULES, key=lambda rule: rule.code)
    ]
    by_code = {section.split()[0]: section for section in sections}
    for rule in RULES:
        for text in (rule.severity.capitalize(), rule.summary, rule.reason, rule.wrong.strip(), rule.right.strip()):
            assert text in by_code[rule.code]
        assert f"[{rule.code}](#{rule.code.lower()}-{rule.name})" in RULE_PAGE


@pytest.mark.parametrize("method", sorted(ALL_METHODS))
def test_every_method_is_documented(method: str) -> None:
    table = METHODS_PAGE.partition("## Bytes")[2].partition("\n## ")[0]
    assert re.search(rf"^\| [^|]*`{method}`[^|]*\|", table, re.MULTILINE)
    assert re.search(rf"^## gradients: .*\b{method}\b", KEY_PAGE, re.MULTILINE)


@pytest.mark.parametrize("method", sorted(ALL_METHODS))
def test_every_method_has_a_section_of_its_own(method: str) -> None:
    assert re.search(rf"^#+ .*`{method}`", METHODS_PAGE, re.MULTILINE)


@pytest.mark.parametrize("method", sorted(ALL_METHODS - {"none", "powersgd"}))
def test_bits_of_an_element_are_those_of_the_payload(method: str) -> None:
    """Checks the column "with defaults" of the table of sizes."""
    documented = re.search(rf"^\| \[[^|]*`{method}`[^|]*\| [^|]+ \| ([\d.]+) \|", METHODS_PAGE, re.MULTILINE)
    section = CompressConfig.model_validate({"gradients": {"method": method}})
    # Use whole blocks of any size, and so many elements that fields sent once per message do not matter.
    bits = 8 * section.gradients.compressor().payload_bytes(2**20) / 2**20
    assert documented is not None
    assert float(documented[1]) == round(bits, 3)


def test_the_measured_table_has_a_figure_for_every_setting() -> None:
    section = METHODS_PAGE.partition("## Measured")[2].partition("\n## ")[0]
    measured = re.findall(r"`([^`]+)`: [+\N{MINUS SIGN}]?\d+\.\d\d(?![\d.])", section)
    different = sorted(set(measured) ^ set(SETTINGS))
    assert sorted(measured) == sorted(SETTINGS), (
        f"the measured table of docs/methods.md and SETTINGS of its program differ in {different}: each setting needs "
        "one figure there"
    )


def test_the_table_of_networks_names_files_and_measured_figures() -> None:
    """Every file exists, and every number of seconds is on the results page."""
    start = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    measured = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    table = re.search(r"^\| rate \|.*\n\|[-|]+\n((?:\|.*\n)+)", start, re.MULTILINE)
    assert table is not None
    files = set(re.findall(r"`(\w+\.json)`", table[1]))
    assert {"zero1_int4_overlap.json", "zero1_int3_overlap.json", "islands4_streamed.json"} <= files
    assert [name for name in sorted(files) if not (ROOT / "configs" / name).is_file()] == []
    seconds = [figure for row in table[1].splitlines() for figure in re.findall(r"\d+\.\d+", row.split("|")[4])]
    assert len(seconds) > 20
    assert [figure for figure in seconds if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", measured)] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of `page`, as GitHub creates them."""
    text = TEXTS[page] if page in TEXTS else page.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", TEXTS[page])):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = Path(os.path.normpath(page.parent / file)) if file else page
        if not (target.exists() or target in GENERATED) or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def snippets(language: str) -> list[Any]:
    found = [(page, match) for page in PAGES for match in FENCE.finditer(page.read_text(encoding="utf-8"))]
    return [pytest.param(m[3], id=f"{page.name}-{m.start()}") for page, m in found if m[2] == language]


def as_ds_config(text: str) -> dict[str, Any]:
    """Return a snippet as a DeepSpeed configuration. The snippet may be the section alone."""
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
    """Yield each invalid snippet and the text block after it."""
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


def glossary() -> list[Any]:
    rows = re.findall(r"^\| ([^|]+) \|[^|]*\|[^|]*\| (`[^|]+`) \|$", GLOSSARY, re.MULTILINE)
    return [pytest.param(name, id=f"{term}-{name}") for term, names in rows for name in re.findall("`([^`]+)`", names)]


def definitions() -> set[str]:
    """Return the classes, functions and assigned names of all modules.

    Modules are only parsed, because some need a GPU.
    """
    found: set[str] = set()
    for file in (ROOT / "deepspeed_compress").rglob("*.py"):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        found |= {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        found |= {ast.unparse(node.targets[0]) for node in body if isinstance(node, ast.Assign)}
    return found


@pytest.fixture(scope="module")
def names() -> set[str]:
    return definitions() | set(key_names(SCHEMA))


@pytest.mark.parametrize("name", glossary())
def test_a_name_of_the_glossary_is_a_key_or_is_in_the_code(names: set[str], name: str) -> None:
    assert name in names


def test_the_glossary_is_read() -> None:
    rows = [line for line in GLOSSARY.splitlines() if re.match(r"\| (?!term|-)", line)]
    assert len(glossary()) >= len(rows) > 50
