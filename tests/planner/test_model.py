import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.cluster import read_cluster
from deepspeed_compress.planner.gpus import find_gpu
from deepspeed_compress.planner.model import Model, read_model

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
MIXTRAL = LLAMA | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN = LLAMA | {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28}
QWEN |= {"num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064}


def model(config: object, directory: Path) -> Model:
    (directory / "config.json").write_text(json.dumps(config))
    return read_model(directory)


@pytest.mark.parametrize(
    ("config", "parameters"), [(GPT2, 124.4e6), (LLAMA, 8.03e9), (MIXTRAL, 46.7e9), (QWEN, 7.62e9)]
)
def test_parameters_are_those_that_are_published(config: dict[str, Any], parameters: float, tmp_path: Path) -> None:
    assert model(config, tmp_path).parameters == pytest.approx(parameters, rel=0.005)


def test_experts_that_a_token_does_not_use_take_no_time(tmp_path: Path) -> None:
    """Mixtral uses 12.9 of its 46.7 billion parameters."""
    assert model(MIXTRAL, tmp_path).flops_per_token(1) == pytest.approx(6 * 12.7e9, rel=0.02)


@pytest.mark.parametrize("config", [[], GPT2 | {"n_layer": 0}, {"n_embd": 768}, GPT2 | {"n_head": True}])
def test_an_incomplete_configuration_is_refused(config: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--model"):
        model(config, tmp_path)


@pytest.mark.parametrize(
    ("text", "name"),
    [("a100", "A100-80"), ("A100-SXM4-40GB", "A100-40"), ("RTX 4090", "4090"), ("GH200", "GH200"), ("GB200", "GB200")],
)
def test_gpus_have_several_names(text: str, name: str) -> None:
    assert find_gpu(text).name == name


@pytest.mark.parametrize(
    ("gpus", "network", "named"),
    [
        ("H100", "1gbit", "--gpus"),
        ("0xH100", "1gbit", "--gpus"),
        ("8xTPU", "1gbit", "TPU"),
        ("12xH100", "1gbit", "12 GPUs"),
        ("8xH100", "fast", "--network"),
        ("8xH100", "0gbit", "--network"),
        ("8xH100", "1.2.3gbit", "--network"),
    ],
)
def test_wrong_clusters_are_named(gpus: str, network: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_cluster(gpus, network)


def test_a_cluster_describes_itself() -> None:
    assert str(read_cluster("4x4090", "1gbit", 1)) == "4 4090 in 4 nodes of 1, 1 Gbit/s per node"
    assert str(read_cluster("4xH100", "1gbit")) == "4 H100 in 1 node of 4"
