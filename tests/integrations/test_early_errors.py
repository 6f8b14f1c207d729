"""Errors in the section are raised when the configuration is read, before a model is loaded."""

import json
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from accelerate import DeepSpeedPlugin
from deepspeed.pipe import PipelineModule
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations import HfDeepSpeedConfig

import deepspeed_compress
from deepspeed_compress import ConfigError, UnsupportedError
from deepspeed_compress.config import SECTION, find_problems
from tests.integrations.trainers import AUTO
from tests.support.forks import run_forks

CONFIGS = Path(__file__).parents[2] / "configs" / "huggingface"
READERS = ("TrainingArguments", "DeepSpeedPlugin", "HfDeepSpeedConfig")


def read(rank: int, reader: str, config: dict[str, Any] | str, directory: str) -> str:
    """Return the error that reading `config` raises; "" if there is none."""
    deepspeed_compress.install()
    readers = {
        "TrainingArguments": lambda: TrainingArguments(output_dir=directory, deepspeed=config, use_cpu=True),
        "DeepSpeedPlugin": lambda: DeepSpeedPlugin(hf_ds_config=config),
        "HfDeepSpeedConfig": lambda: HfDeepSpeedConfig(config),
    }
    try:
        readers[reader]()
    except (ConfigError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def error_of(config: dict[str, Any] | str, tmp_path: Path, reader: str = "TrainingArguments") -> str:
    first, second = run_forks(2, read, reader, config, str(tmp_path))
    assert first == second
    return first


def config(section: object, **more: Any) -> dict[str, Any]:
    return {**AUTO, "zero_optimization": {"stage": 2}, SECTION: section, **more}


@pytest.mark.parametrize("reader", READERS)
def test_a_typo_in_the_section_is_reported(reader: str, tmp_path: Path) -> None:
    text = error_of(config({"gradients": {"bit": 4}}), tmp_path, reader)
    assert text.startswith("ConfigError: ")
    assert f"/{SECTION}/gradients/bit: unknown key" in text
    assert '"bits", if you meant that' in text


def test_a_typo_in_a_file_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config({"gradients": {"methd": "topk"}})))
    assert f"/{SECTION}/gradients/methd: unknown key" in error_of(str(file), tmp_path)


def test_a_typo_in_the_name_of_the_section_is_reported(tmp_path: Path) -> None:
    wrong = config({})
    wrong["deepspeed_compres"] = wrong.pop(SECTION)
    assert 'found "deepspeed_compres" instead' in error_of(wrong, tmp_path)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"parallelism": {"zero_stage": 1}}, r"ConfigError: .*/parallelism/zero_stage: 1 disagrees"),
        ({"parallelism": {"tensor": 3}}, r"ConfigError: .*do not divide the world size 2"),
        (
            {"parallelism": {"pipeline": 2, "zero_stage": 0}},
            r"UnsupportedError: .*/parallelism/pipeline: 2 .*train_gpt",
        ),
        # The optimizer's betas are "auto"; Trainer fills in 0.9 for the first.
        ({"gradients": {"method": "demo"}}, r"ConfigError: .*/gradients/method: \"demo\".*betas"),
    ],
)
def test_a_contradiction_is_reported(section: dict[str, Any], message: str, tmp_path: Path) -> None:
    zero = {} if section.get("parallelism", {}).get("pipeline") else {"stage": 2}
    text = error_of(config(section, zero_optimization=zero), tmp_path)
    assert re.search(message, text.replace("\n", " ")), text


def without_momentum(rank: int, config: dict[str, Any], directory: str) -> object:
    """Return the betas that are filled in if the script gets the option that the error recommends."""
    deepspeed_compress.install()
    args = TrainingArguments(output_dir=directory, deepspeed=config, use_cpu=True, adam_beta1=0.0)
    return args.hf_deepspeed_config.config["optimizer"]["params"]["betas"]


def test_the_remedy_for_a_second_momentum_works_with_trainer(tmp_path: Path) -> None:
    demo = config({"gradients": {"method": "demo"}})
    assert '"betas": "auto", and pass --adam_beta1 0 to the script' in error_of(demo, tmp_path)
    assert run_forks(2, without_momentum, demo, str(tmp_path)) == [[0.0, 0.999]] * 2


@pytest.mark.parametrize("reader", READERS)
def test_auto_values_and_other_configurations_pass(reader: str, tmp_path: Path) -> None:
    assert error_of(config({"gradients": {"bits": 4}}), tmp_path, reader) == ""
    without = config({})
    del without[SECTION]
    assert error_of(without, tmp_path, reader) == ""


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.json")), ids=lambda file: file.stem)
def test_shipped_configurations_pass(file: Path, tmp_path: Path) -> None:
    assert error_of(str(file), tmp_path) == ""
    assert find_problems(json.loads(file.read_text()), 2) == []


def stages(rank: int, directory: str) -> list[object]:
    """Return the ZeRO stage that Hugging Face libraries see if only the section sets it."""
    deepspeed_compress.install()
    args = TrainingArguments(
        output_dir=directory, deepspeed={**AUTO, SECTION: {"parallelism": {"zero_stage": 3}}}, use_cpu=True
    )
    return [args.deepspeed_plugin.zero_stage, args.hf_deepspeed_config.is_zero3()]


def test_the_stage_may_be_set_only_in_the_section(tmp_path: Path) -> None:
    assert run_forks(2, stages, str(tmp_path)) == [[3, True]] * 2


def pipeline_in_trainer(rank: int, directory: str) -> str:
    deepspeed_compress.install()

    args = TrainingArguments(output_dir=directory, deepspeed=config({}), use_cpu=True)
    deepspeed.init_distributed("gloo")
    model = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=2)
    with pytest.raises(UnsupportedError) as raised:
        Trainer(model, args)
    return str(raised.value)


def test_a_pipeline_module_is_refused(tmp_path: Path) -> None:
    for text in run_forks(2, pipeline_in_trainer, str(tmp_path)):
        assert "PipelineModule" in text
        assert "build_parallel" in text
