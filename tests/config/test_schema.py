import json
from pathlib import Path

import jsonschema
import pytest

from deepspeed_compress.config import SECTION
from deepspeed_compress.config.schema import json_schema
from tests.support.processes import run_python

pytestmark = pytest.mark.sampled(4)


def test_schema_is_valid_and_describes_every_key() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for model in (schema, *schema["$defs"].values()):
        assert model["additionalProperties"] is False
        assert model["description"]
        assert [key for key, child in model["properties"].items() if not child.get("description")] == []


UNUSED = """
import ast
ast.parse = None
from deepspeed_compress.config import CompressConfig, Guard
from deepspeed_compress.config.section import find_problems
CompressConfig.model_json_schema = None
assert find_problems({"deepspeed_compress": {"gradients": {"bits": 4}}}) == []
print(Guard.__pydantic_complete__)
"""


def test_a_valid_section_needs_neither_sources_nor_schema_nor_models_of_other_keys() -> None:
    """Loading them takes longer than everything else that a section needs."""
    done = run_python("-c", UNUSED)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.parametrize(
    "section",
    [
        {"gradients": {"bits": 5}},
        {"gradients": {"method": "topk", "bits": 4}},
        {"gradients": {"density": 0.1}},
        {"weights": {"method": "topk", "density_warmup_steps": 5}},
        {"gradients": {"method": "powersgd", "hierarchy": {"ranks_per_node": 2}}},
        {"gradients": {"method": "demo", "rotation": None}},
        {"gradients": {"hierarchy": {"ranks_per_node": 2, "inside": {"method": "topk"}}}},
        *({"gradients": {"overrides": [{"method": method}]}} for method in ("none", "blockwise", "qsgd")),
        {"gradients": {"overrides": [{"parameters": "a"}]}},
        {"parallelism": {"zero_stage": "auto"}},
    ],
)
def test_the_schema_refuses_the_same_sections_as_the_models(section: dict) -> None:
    assert not jsonschema.Draft202012Validator(json_schema()).is_valid(section)


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "configs").glob("*.json")), ids=lambda f: f.stem)
def test_shipped_sections_fit_the_schema(file: Path) -> None:
    section = json.loads(file.read_text(encoding="utf-8"))[SECTION]
    jsonschema.Draft202012Validator(json_schema()).validate(section)


def test_one_key_has_one_default_but_for_these() -> None:
    """A key has the same meaning and default everywhere, so that users can remember it."""
    defaults: dict[str, set[str]] = {}
    for model in json_schema()["$defs"].values():
        for key, child in model["properties"].items():
            if "default" in child:
                defaults.setdefault(key, set()).add(json.dumps(child["default"]))
    assert {key for key, default in defaults.items() if len(default) > 1} == {
        "bits",
        "block_size",
        "density",
        "error_feedback",
        "every",
        "levels",
        "memory",
        "method",
        "momentum",
        "pipeline",
        "tensor",
        "timeout",
        "values",
        "weights",
    }


def test_importing_the_config_loads_nothing_heavy() -> None:
    code = (
        "import sys, deepspeed_compress.config, deepspeed_compress.cli;"
        "print(sorted({'torch', 'deepspeed', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = run_python("-c", code, check=True)
    assert done.stdout.strip() == "[]"
