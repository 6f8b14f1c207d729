"""Models built from config files and directories."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.models import build_model, read_model_config
from tests.support.model_configs import GPT2

GPT2 = {**GPT2, "n_layer": 3}


def write_config(directory: Path, **changes: Any) -> Path:
    file = directory / "model.json"
    file.write_text(json.dumps(GPT2 | changes))
    return file


def build(file: Path, seed: int = 0) -> Any:
    return build_model(file, read_model_config(file), seed)


def test_the_seed_determines_new_weights(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    weights = [build(file, seed).state_dict()["transformer.wpe.weight"] for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_weights_of_a_directory_are_loaded(tmp_path: Path) -> None:
    model = build(write_config(tmp_path), seed=5)
    model.save_pretrained(tmp_path / "saved")
    loaded = build(tmp_path / "saved", seed=6)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", r"list \(allowed: an object\)"),
    ],
)
def test_an_invalid_config_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path / "model.json")


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model .*nowhere: No such file .*Write the config\.json of a model"):
        read_model_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt_1m", 1_152_128), ("gpt_2m", 2_243_040), ("gpt_10m", 10_481_152)]
)
def test_the_example_models_have_their_documented_sizes(name: str, parameters: int) -> None:
    file = Path(__file__).parents[2] / "configs" / "models" / f"{name}.json"
    assert build(file).num_parameters() == parameters
