"""Errors in the section are raised when the configuration is read, before a model is loaded."""

import json
import re
from pathlib import Path
from typing import Any

from accelerate import DeepSpeedPlugin
from transformers import TrainingArguments
from transformers.integrations import HfDeepSpeedConfig

import deepspeed_compress
from deepspeed_compress import ConfigError, UnsupportedError
from deepspeed_compress.config import SECTION
from tests.integrations.trainers import AUTO
from tests.support.forks import run_forks

CONFIGS = Path(__file__).parents[2] / "configs" / "huggingface"
READERS = ("TrainingArguments", "DeepSpeedPlugin", "HfDeepSpeedConfig")


def config(section: object, **more: Any) -> dict[str, Any]:
    return {**AUTO, "zero_optimization": {"stage": 2}, SECTION: section, **more}


DEMO = config({"gradients": {"method": "demo"}})
CASES: dict[str, tuple[Any, str]] = {
    "name": ({"deepspeed_compres": {}, **AUTO, "zero_optimization": {"stage": 2}}, 'found "deepspeed_compres" instead'),
    "stage": (config({"parallelism": {"zero_stage": 1}}), r"ConfigError: .*/parallelism/zero_stage: 1 disagrees"),
    "tensor": (config({"parallelism": {"tensor": 3}}), r"ConfigError: .*do not divide the world size 2"),
    "pipeline": (
        config({"parallelism": {"pipeline": 2, "zero_stage": 0}}, zero_optimization={}),
        r"UnsupportedError: .*/parallelism/pipeline: 2 .*train_gpt",
    ),
    # The optimizer's betas are "auto"; Trainer fills in 0.9 for the first.
    "momentum": (DEMO, r"ConfigError: .*/gradients/method: \"demo\".*betas.* and pass --adam_beta1 0 to the script"),
    **{str(file): (str(file), "^$") for file in sorted(CONFIGS.glob("*.json"))},
}
"""Configurations, and a pattern of the error that reading them with `TrainingArguments` raises."""
OF_READERS: dict[str, tuple[Any, str]] = {
    "typo": (config({"gradients": {"bit": 4}}), f'^ConfigError: .*/{SECTION}/gradients/bit: unknown key.*"bits", if'),
    "auto": (config({"gradients": {"bits": 4}}), "^$"),
    "plain": ({**AUTO, "zero_optimization": {"stage": 2}}, "^$"),
}


def read_all(rank: int, directory: str) -> dict[tuple[str, str], str]:
    """Return the error of each configuration and reader, "" if there is none."""
    deepspeed_compress.install()
    file = Path(directory, f"{rank}.json")
    file.write_text(json.dumps(config({"gradients": {"methd": "topk"}})))
    of_readers = [(name, reader, given) for name, (given, _) in OF_READERS.items() for reader in READERS]
    others = [(name, READERS[0], given) for name, (given, _) in CASES.items()]
    every = [*of_readers, *others, ("file", READERS[0], str(file))]
    return {(name, reader): read(reader, given, directory) for name, reader, given in every}


def read(reader: str, config: dict[str, Any] | str, directory: str) -> str:
    readers = {
        "TrainingArguments": lambda: TrainingArguments(output_dir=directory, deepspeed=config, use_cpu=True),
        "DeepSpeedPlugin": lambda: DeepSpeedPlugin(hf_ds_config=config),
        "HfDeepSpeedConfig": lambda: HfDeepSpeedConfig(config),
    }
    try:
        readers[reader]()
    except (ConfigError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return ""


def test_errors_are_raised_by_every_reader_on_all_ranks(tmp_path: Path) -> None:
    for errors in run_forks(2, read_all, str(tmp_path)):
        assert f"/{SECTION}/gradients/methd: unknown key" in errors.pop(("file", READERS[0]))
        for (name, _), text in errors.items():
            assert re.search({**CASES, **OF_READERS}[name][1], text), (name, text)


def without_momentum(rank: int, config: dict[str, Any], directory: str) -> object:
    """Return the betas that are filled in if the script gets the option that the error recommends."""
    deepspeed_compress.install()
    args = TrainingArguments(output_dir=directory, deepspeed=config, use_cpu=True, adam_beta1=0.0)
    return args.hf_deepspeed_config.config["optimizer"]["params"]["betas"]


def test_the_remedy_for_a_second_momentum_works_with_trainer(tmp_path: Path) -> None:
    assert run_forks(2, without_momentum, DEMO, str(tmp_path)) == [[0.0, 0.999]] * 2


def stages(rank: int, directory: str) -> list[object]:
    """Return the ZeRO stage that Hugging Face libraries see if only the section sets it."""
    deepspeed_compress.install()
    args = TrainingArguments(
        output_dir=directory, deepspeed={**AUTO, SECTION: {"parallelism": {"zero_stage": 3}}}, use_cpu=True
    )
    return [args.deepspeed_plugin.zero_stage, args.hf_deepspeed_config.is_zero3()]


def test_the_stage_may_be_set_only_in_the_section(tmp_path: Path) -> None:
    assert run_forks(2, stages, str(tmp_path)) == [[3, True]] * 2
