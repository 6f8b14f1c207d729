"""The JSON Schema of a whole configuration: strict in our section, and open to everything else that DeepSpeed reads."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.tools.lint.keys import keys
from deepspeed_compress.tools.schema import file_schema

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = [path for path in sorted(CONFIGS.rglob("*.json")) if "models" not in path.parts]
TRAINER = {
    "$schema": "./ds_config.schema.json",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "cpu"}},
    "a_key_of_another_program": 1,
}


def problems(config: dict[str, Any]) -> list[str]:
    """Return the paths of what is wrong."""
    return [error.json_path for error in jsonschema.Draft202012Validator(file_schema()).iter_errors(config)]


def test_the_schema_is_valid_and_describes_the_keys_of_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--file"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == file_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for path, section in keys().sections.items():
        node = schema
        for part in path:
            node = node["properties"][part]
        assert {*section.keys} <= {*node["properties"]}
        assert all(child.get("description") or "$ref" in child for child in node["properties"].values())


def test_configurations_of_deepspeed_and_of_the_trainer_pass() -> None:
    assert len(FILES) > 30
    configs = [json.loads(file.read_text()) for file in FILES]
    assert {file.name: problems(config) for file, config in zip(FILES, configs, strict=True) if problems(config)} == {}
    assert problems(TRAINER | {"deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}}) == []


@pytest.mark.parametrize("section", [{"gradient": {}}, {"gradients": {"bitz": 4}}, {"gradients": {"bits": 5}}])
def test_a_mistake_in_our_section_fails(section: dict[str, Any]) -> None:
    [first, *_] = problems(TRAINER | {"deepspeed_compress": section})
    assert first.startswith("$.deepspeed_compress")
