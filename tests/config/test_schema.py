import subprocess
import sys

import jsonschema
import pytest

from deepspeed_compress.config import json_schema


def test_schema_is_valid_and_describes_every_key() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for model in (schema, *schema["$defs"].values()):
        assert model["additionalProperties"] is False
        assert model["description"]
        assert [key for key, child in model["properties"].items() if not child.get("description")] == []


@pytest.mark.parametrize(
    "section",
    [
        {"gradients": {"bits": 3}},
        {"gradients": {"method": "topk", "density": 0}},
        {"gradients": {"method": "topk", "bits": 4}},
        {"gradients": {"block_size": 100}},
        {"gradients": {"density": 0.1}},
        {"weights": {}},
        {"parallelism": {"zero_stage": "auto"}},
    ],
)
def test_schema_refuses_what_the_models_refuse(section: dict) -> None:
    assert not jsonschema.Draft202012Validator(json_schema()).is_valid(section)


def test_importing_the_config_loads_nothing_heavy() -> None:
    code = (
        "import sys, deepspeed_compress.config, deepspeed_compress.cli;"
        "print(sorted({'torch', 'deepspeed', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
