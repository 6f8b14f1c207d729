"""Invalid layouts and damaged model directories raise one clear error before any step."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspeed_compress.config import SECTION, expand, parse_section
from deepspeed_compress.errors import CompressError, ConfigError, UnsupportedError
from deepspeed_compress.models import Layout, build_model, build_parallel, check_layout, read_model_config
from deepspeed_compress.models.sources import build_skeleton, fill, open_source
from deepspeed_compress.training.options import parse_options
from deepspeed_compress.training.ranks import Ranks
from deepspeed_compress.training.setup import read_run_config
from tests.models.families import save_model, write_config
from tests.models.runs import SEED
from tests.support.forks import run_forks

# Layouts that do not fit the model


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tensor=3), "/parallelism/tensor: 3 does not divide the model's num_attention_heads 4 "),
        (Layout(tensor=4), "/parallelism/tensor: 4 does not divide the model's num_key_value_heads 2 "),
        (Layout(tensor=3, pipeline=9), "/parallelism/tensor: 3 does not divide"),
        (Layout(pipeline=4), "/parallelism/pipeline: 4 stages are more than the model's 3 layers .* fewer stages"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(layout: Layout, message: str, tmp_path: Path) -> None:
    config = read_model_config(write_config(tmp_path, "llama"))
    with pytest.raises(CompressError, match=message):
        check_layout(config, layout)


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2)])
def test_an_unknown_family_cannot_be_split(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    config = read_model_config(tmp_path)
    check_layout(config, Layout())
    with pytest.raises(UnsupportedError, match=r'"opt" does not support .*allowed: "gemma2", .* add its modules to '):
        check_layout(config, layout)


# Jobs of the wrong size, or with an unsupported ZeRO stage


def ds_config(**parallelism: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {}},
        SECTION: {"parallelism": parallelism},
    }


def test_a_world_size_that_the_layout_does_not_divide_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ds_config(tensor=2, pipeline=2)))
    model = write_config(tmp_path, "gpt2")
    text = f"--deepspeed_config {tmp_path / 'ds.json'} --data a --output-dir o --seq-len 16 --model {model}"
    assert read_run_config(parse_options(text.split()), Ranks(0, 8, 0)).layout == Layout(tensor=2, pipeline=2)
    with pytest.raises(ConfigError, match=r"tensor 2 x pipeline 2 .* 6 "):
        read_run_config(parse_options(text.split()), Ranks(0, 6, 0))


def build(rank: int, *jobs: tuple[Path, Layout]) -> list[str]:
    """Return this rank's error for each job."""
    deepspeed.init_distributed("gloo")
    return [error_of(path, layout) for path, layout in jobs]


def error_of(path: Path, layout: Layout) -> str:
    try:
        build_parallel(path, read_model_config(path), SEED, layout)
    except CompressError as error:
        return str(error)
    return ""


def test_all_ranks_raise_the_same_error_before_they_communicate(tmp_path: Path) -> None:
    """All stages report a missing tensor, even if only one stage needs it."""
    model, broken = write_config(tmp_path / "a", "gpt2"), save_model(tmp_path / "b", "gpt2")
    drop_tensor(broken, "transformer.ln_f.weight")
    layouts = Layout(2, 2), Layout(1, 2, (1, 1)), Layout(1, 2, (3,)), Layout(1, 2, (3, 0))
    jobs = [*((model, layout) for layout in layouts), (broken, Layout(1, 2))]
    for world, total, length, valid, missing in run_forks(2, build, *jobs):
        assert "/parallelism: tensor 2 x pipeline 2 = 4 ranks do not divide the world size 2" in world
        wanted = "/parallelism/partition: [1, 1] (allowed: 2 numbers, one per stage, with a sum of 3 decoder layers"
        assert wanted in total
        assert "/parallelism/partition: [3] (allowed: 2 numbers" in length
        assert valid == ""
        assert "no file contains the weight transformer.ln_f.weight" in missing


# Files


def index_of(directory: Path) -> Path:
    return directory / "model.safetensors.index.json"


def weight_map(directory: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(index_of(directory).read_text())["weight_map"]
    return found


def change_index(directory: Path, **changes: Any) -> None:
    values = json.loads(index_of(directory).read_text())
    index_of(directory).write_text(json.dumps(values | changes))


def drop_tensor(directory: Path, name: str = "transformer.h.1.attn.c_attn.weight") -> None:
    """Remove a tensor from its file and from the index."""
    named = weight_map(directory)
    file = directory / named.pop(name)
    change_index(directory, weight_map=named)
    save_file({key: value for key, value in load_file(file).items() if key != name}, file, {"format": "pt"})


def change_sizes(directory: Path) -> None:
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(values | {"n_positions": 32}))


def save_as_pickle(directory: Path) -> None:
    for file in [*directory.glob("model-*.safetensors"), index_of(directory)]:
        file.unlink()
    torch.save({}, directory / "pytorch_model.bin")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor is missing": (drop_tensor, r"no file contains the weight transformer\.h\.1\.attn\.c_attn\.weight"),
    "the index is missing": (
        lambda directory: index_of(directory).unlink(),
        r"has model-00001-of-\d+\.safetensors, but neither .* nor .*index\.json; copy the index as well",
    ),
    "the config is of another model": (
        change_sizes,
        r"the weight transformer\.wpe\.weight has shape \(64, 32\), but the config implies",
    ),
    "weights in another format": (save_as_pickle, r"has pytorch_model\.bin, but neither .* in the safetensors format"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("saved"), "gpt2")


@pytest.fixture
def damaged(request: pytest.FixtureRequest, saved: Path, tmp_path: Path) -> tuple[Path, str]:
    """Damaged directory, and the message about it."""
    damage, message = DAMAGES[request.param]
    directory = tmp_path / "model"
    shutil.copytree(saved, directory)
    damage(directory)
    return directory, message


@pytest.mark.parametrize("damaged", DAMAGES, indirect=True)
def test_a_damaged_directory_is_refused_for_a_split_model(damaged: tuple[Path, str]) -> None:
    directory, message = damaged
    config = read_model_config(directory)
    model = build_skeleton(config)
    with pytest.raises(ConfigError, match=message):
        fill(model, open_source(directory, model, SEED))


@pytest.mark.parametrize("damaged", DAMAGES, indirect=True)
def test_a_damaged_directory_is_refused_for_a_whole_model(damaged: tuple[Path, str]) -> None:
    """Otherwise, transformers might silently initialize weights."""
    directory, _ = damaged
    with pytest.raises((ConfigError, RuntimeError)):
        build_model(directory, read_model_config(directory), SEED)


def test_the_head_count_of_gpt2_is_checked(tmp_path: Path) -> None:
    config = read_model_config(write_config(tmp_path, "gpt2"))
    with pytest.raises(ConfigError, match=r"/tensor: 3 does not divide .*heads 4 \(allowed: its divisors\)"):
        check_layout(config, Layout(tensor=3))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pipeline_with_partitioned_gradients_is_refused(stage: int) -> None:
    config = ds_config(pipeline=2)
    for both in (ds_config(pipeline=2, zero_stage=stage), config | {"zero_optimization": {"stage": stage}}):
        with pytest.raises(ConfigError, match=rf"stage.*: {stage} cannot be combined with .*/pipeline: 2 .* 0, 1\)"):
            expand(both, parse_section(both))


@pytest.mark.parametrize("text", ["{", '{"a":' * 100_000], ids=["truncated", "nested too deeply"])
def test_a_config_that_cannot_be_parsed_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--model .*config\.json: not JSON: .* Write the config\.json"):
        read_model_config(tmp_path)


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
