import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.cluster import read_cluster
from deepspeed_compress.planner.gpus import find_gpu
from deepspeed_compress.planner.model import TYPICAL, Model, read_model

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
GEMMA = LLAMA | {"model_type": "gemma", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
GEMMA |= {"num_key_value_heads": 16, "head_dim": 256, "intermediate_size": 24576, "vocab_size": 256000}
QWEN_MOE = LLAMA | {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_experts": 128}
QWEN_MOE |= {"num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936}
QWEN_MOE |= {"moe_intermediate_size": 768, "num_experts_per_tok": 8, "mlp_only_layers": [], "decoder_sparse_step": 1}
DEEPSEEK = LLAMA | {"model_type": "deepseek_v3", "n_routed_experts": 256, "num_experts_per_tok": 8, "kv_lora_rank": 512}


def model(config: object, directory: Path) -> Model:
    (directory / "config.json").write_text(json.dumps(config))
    return read_model(directory)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(GPT2, 124.4e6), (LLAMA, 8.03e9), (MIXTRAL, 46.7e9), (QWEN, 7.62e9), (GEMMA, 8.54e9), (QWEN_MOE, 30.5e9)],
)
def test_parameters_are_those_that_are_published(config: dict[str, Any], parameters: float, tmp_path: Path) -> None:
    assert model(config, tmp_path).parameters == pytest.approx(parameters, rel=0.005)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ([], r"list \(allowed: an object\)"),
        ({"n_embd": 768}, "num_hidden_layers"),
        (GPT2 | {"n_layer": 0}, "n_layer is 0"),
        (GPT2 | {"n_head": True}, "n_head is True"),
        (GPT2 | {"n_head": 10}, "head_dim"),
        (LLAMA | {"num_key_value_heads": 7}, "num_key_value_heads 7"),
        (LLAMA | {"intermediate_size": "14336"}, "intermediate_size is '14336'"),
        (MIXTRAL | {"num_local_experts": "8"}, "num_local_experts is '8'"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
        (QWEN_MOE | {"mlp_only_layers": [0]}, "mlp_only_layers"),
        (DEEPSEEK, "model_type is 'deepseek_v3'"),
        (LLAMA | {"model_type": "bert"}, "model_type is 'bert'"),
        (LLAMA | {"hidden_size": 10**400}, "hidden_size is 1000"),
    ],
)
def test_a_configuration_that_is_not_understood_is_refused(config: object, named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"--model .*{named}"):
        model(config, tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b'{"a":' * 100_000], ids=["no text", "nested too deeply"])
def test_a_file_that_cannot_be_parsed_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match="--model"):
        read_model(tmp_path)


def test_keys_that_are_left_out_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    """Gemma ties its embedding. GPT-2 has dropout, and learned positions that limit its sequences."""
    assert model(GEMMA, tmp_path).tied
    assert not model(LLAMA, tmp_path).tied
    assert [model(GPT2 | more, tmp_path).dropout for more in ({}, {"resid_pdrop": 0.0})] == [True, False]
    short = model({key: value for key, value in GPT2.items() if key != "n_positions"}, tmp_path)
    assert (short.positions, short.longest) == (1024, 1024)
    assert model(LLAMA | {"max_position_embeddings": 8192}, tmp_path).longest == 8192


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100-SXM4-40GB", "A100-40"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("RTX4090", "4090"),
        ("RTX5090-32GB", "5090"),
        ("H100SXM5", "H100"),
        ("H100 PCIe 80", "H100-PCIe"),
        ("V100-32", "V100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("DGX Spark", "GB10"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H100 80GB HBM3", "H100"),
    ],
)
def test_gpus_have_several_names(text: str, name: str) -> None:
    assert find_gpu(text).name == name


@pytest.mark.parametrize(
    "text",
    [
        "A1000",
        "H100 NVL",
        "V100-16GB",
        "RTX 6000 Ada",
        "4090-80",
        "TPU",
    ],
)
def test_another_gpu_is_not_taken_for_one_of_the_table(text: str) -> None:
    with pytest.raises(ConfigError, match="is not in the table"):
        find_gpu(text)


@pytest.mark.parametrize(
    ("gpus", "network", "named"),
    [
        ("H100", "1gbit", "--gpus"),
        ("8xTPU", "1gbit", "TPU"),
        ("12xH100", "1gbit", "12 GPUs"),
        ("8xH100", "fast", "--network"),
        ("8xH100", "100GBps", "--network"),
        ("8xH100", "8x200gbit/gpu", "--network"),
        ("8xH100", f"{'9' * 400}gbit", "--network"),
        (f"{'9' * 5000}xH100", "1gbit", "--gpus"),
        ("8xA100+4xL4", "1gbit", "nodes of 8 A100-80 and 4 L4"),
        ("8xA100+8xMI300X", "1gbit", "no common library"),
        ("8xA100+", "1gbit", "--gpus: ''"),
    ],
)
def test_wrong_clusters_are_named(gpus: str, network: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_cluster(gpus, network)


@pytest.mark.parametrize("name", TYPICAL)
def test_usual_sizes_have_the_parameters_of_their_names(name: str) -> None:
    model = read_model(Path(name.lower()))
    assert model.parameters == pytest.approx(float(name[:-1]) * 1e9, rel=0.25)
    assert model.heads * model.head_size == model.hidden


def test_experts_that_a_token_does_not_use_take_no_time(tmp_path: Path) -> None:
    """Mixtral uses 12.9 of its 46.7 billion parameters."""
    assert model(MIXTRAL, tmp_path).flops_per_token(1) == pytest.approx(6 * 12.7e9, rel=0.02)


def test_a_cluster_describes_itself() -> None:
    assert str(read_cluster("4x4090", "1gbit", 1)) == "4 4090 in 4 nodes of 1, 1 Gbit/s per node"
    assert str(read_cluster("4xH100", "1gbit")) == "4 H100 in 1 node of 4"
