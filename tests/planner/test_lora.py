"""LoRA and QLoRA: parameters of the adapters, and the bytes, memory and time that frozen weights need or save."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from deepspeed_compress.cli import main
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.planner.predict import Prediction
from deepspeed_compress.planner.search import search
from tests.planner.jobs import LLAMA_7B, job, layout

peft = pytest.importorskip("peft", reason="it comes with the dev extra")

LORA, QLORA = replace(LLAMA_7B, rank=16), replace(LLAMA_7B, rank=16, base_bits=4.5)
NODES = "16xA100"
OVER_ALL, WITHIN = layout(data=16, zero=3, micro=1), layout(data=16, zero=3, micro=1, shard_within=8)


def predicted(model: Any, chosen: Any) -> Prediction:
    return job(NODES, "10gbit/node", model=model, seq=2048).predict(chosen)


def sent(prediction: Prediction) -> float:
    """Return the bytes that a rank sends to other nodes in a step."""
    return sum(term.outside for term in prediction.terms)


def test_the_parameters_of_adapters_are_those_that_are_published() -> None:
    """PEFT prints 39,976,960 trainable parameters for Llama 2 7B with rank 16 on all linear layers."""
    assert LORA.trained_parameters == 39_976_960
    assert LLAMA_7B.trained_parameters == LLAMA_7B.parameters


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gpt2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_of_adapters_are_those_of_peft(family: str, tmp_path: Path) -> None:
    mlp = {} if family == "gpt2" else {"intermediate_size": 48}
    config = AutoConfig.for_model(family, **SIZES, **mlp, **FAMILIES[family])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", fan_in_fan_out=family == "gpt2")
    )
    trained = sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)
    assert replace(read_model(tmp_path), rank=4).trained_parameters == trained


def test_zero_3_over_all_nodes_sends_the_frozen_weights_and_sharding_within_nodes_only_adapters() -> None:
    everything, adapters = predicted(LORA, OVER_ALL), predicted(LORA, WITHIN)
    frozen = 2 * LORA.parameters
    passes = OVER_ALL.accumulation * 2
    # A node's eight ranks send what one ring through all ranks carries.
    assert 8 * sent(everything) == pytest.approx(passes * frozen, rel=0.2)
    assert 8 * sent(adapters) < 3 * 2 * LORA.trained_parameters
    assert everything.seconds > 20 * adapters.seconds


def test_frozen_weights_have_neither_gradients_nor_optimizer_states() -> None:
    everything, adapters = (predicted(model, WITHIN).memory.states for model in (LLAMA_7B, LORA))
    assert everything == pytest.approx(16 * LLAMA_7B.parameters / 8)
    assert adapters == pytest.approx((2 * LORA.parameters + 16 * LORA.trained_parameters) / 8, rel=2e-3)


def test_few_bits_need_less_memory_and_network_and_more_time_to_unpack() -> None:
    plain, packed = (predicted(model, OVER_ALL) for model in (LORA, QLORA))
    trained = 16 * LORA.trained_parameters
    assert packed.memory.states == pytest.approx((4.5 / 8 * LORA.parameters + trained) / 16, rel=1e-3)
    assert sent(packed) < 0.3 * sent(plain)
    plain, packed = (predicted(model, WITHIN) for model in (LORA, QLORA))
    assert packed.seconds > plain.seconds


def test_backward_computes_no_gradients_of_frozen_weights() -> None:
    whole, adapters = (predicted(model, WITHIN) for model in (LLAMA_7B, LORA))
    products = [next(term.seconds for term in one.terms if term.name == "matrix products") for one in (whole, adapters)]
    assert products[1] == pytest.approx(products[0] * 2 / 3, rel=0.05)


def test_lora_is_planned_without_islands_and_split_layers() -> None:
    plan = search(job(NODES, "10gbit/node", model=LORA, batch=64, seq=2048))
    layouts = [one.layout for one in plan.fitting]
    assert layouts
    assert {(one.tensor, one.pipeline, one.islands, one.weight_bits) for one in layouts} == {(1, 1, 1, 0)}
    assert plan.recommended.layout.shard_within in (0, 8)


def command(directory: Path, *more: str) -> int:
    AutoConfig.for_model("llama", **SIZES).save_pretrained(directory)
    given = ["--model", str(directory), "--gpus", NODES, "--network", "10gbit", "--batch", "64", "--seq", "512"]
    return main(["plan", "cluster", *given, *more])


def test_the_command_plans_lora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lora = ("--lora-rank", "8", "--base-bits", "4.5")
    assert command(tmp_path, *lora, "--software", "hf", "--output", str(tmp_path / "plan")) == 0
    assert "of them in adapters)" in capsys.readouterr().out
    assert "ds-compress run" in (tmp_path / "plan" / "launch.sh").read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--lora-rank", "8", "--output", "plan"), "launch/train_gpt.py trains all parameters"),
        (("--base-bits", "4.5"), "write --lora-rank"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    options: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path, *options) == 1
    assert text in capsys.readouterr().err
