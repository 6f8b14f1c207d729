"""TRL's GRPO with a real vLLM server that follows each step. `.ci/vllm.sh` installs both, and runs these tests."""

import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

import deepspeed_compress
from deepspeed_compress.rollout.vllm import ServedEngine, load_version
from deepspeed_compress.rollout.vllm_adapters import ServedAdapters
from tests.rollout.test_vllm_engine import WORDS, Served, make_model
from tests.support.forks import run_forks
from tests.support.hosts import needs_vllm

pytestmark = needs_vllm("trl", "peft")
STEPS = 10
TASKS = [" ".join(map(str, range(first, first + 20))) for first in range(0, 160, 10)]
ADAPTER = ("q_proj", "v_proj", "down_proj")


def small_numbers(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion: the share of numbers in the lower half of the vocabulary."""
    answers = [[int(word) for word in text.split() if word.isdigit()] for text in completions]
    return [sum(word < WORDS // 2 for word in answer) / max(1, len(answer)) for answer in answers]


def train(rank: int, directory: str, url: str, adapters: str | None) -> list[float]:
    """Train by GRPO, and save the model. Return the seconds of each update of the server."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from deepspeed_compress.integrations.trl import published_weights

    deepspeed_compress.install()
    versions = f"{directory}/versions"
    section = {"rollout": {"directory": versions, "adapters": adapters}, "monitor": {"path": f"{directory}/run"}}
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "deepspeed_compress": {"gradients": {"bits": 4}, **section},
    }
    args = GRPOConfig(
        output_dir=directory,
        deepspeed=config,
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-3 if adapters is None else 1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
    )
    lora = LoraConfig(r=8, target_modules=list(ADAPTER), task_type="CAUSAL_LM") if adapters else None
    model = AutoModelForCausalLM.from_pretrained(f"{directory}/model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(f"{directory}/model")
    tasks = Dataset.from_dict({"prompt": TASKS})
    with published_weights(versions, f"{directory}/adapters"):
        trainer = GRPOTrainer(
            model, small_numbers, args, train_dataset=tasks, processing_class=tokenizer, peft_config=lora
        )
    seconds, sync = [], trainer.vllm_generation.sync_weights

    def timed() -> None:
        begin = time.perf_counter()
        sync()
        seconds.append(time.perf_counter() - begin)

    trainer.vllm_generation.sync_weights = timed
    trainer.train()
    trainer.model_wrapped.rollout.wait()
    if rank == 0:
        module = trainer.model_wrapped.module
        module = module.merge_and_unload() if adapters == "merged" else module
        module.save_pretrained(f"{directory}/trained")
    return seconds


def load_trained(directory: Path, adapters: str | None) -> Any:
    """Return the saved model in fp32, with what was published of it rounded to bf16."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = directory / ("model" if adapters == "alone" else "trained")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, directory / "trained") if adapters == "alone" else model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    found = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
    answer: list[int] = found[0, len(prompt) :].tolist()
    return answer


@pytest.mark.parametrize("adapters", [None, "alone", "merged"])
def test_a_server_has_the_weights_of_the_trainer(adapters: str | None, tmp_path: Path) -> None:
    make_model("Llama", tmp_path / "model")
    options = ["--logprobs-mode", "processed_logprobs", *(["--enable-lora"] if adapters == "alone" else [])]
    prompts = [[int(word) for word in text.split()] for text in TASKS[:8]]
    with Served(tmp_path / "model", tmp_path / "vllm.log", *options) as server:
        before = [one["token_ids"] for one in ask(server, "", prompts)]
        seconds = run_forks(2, train, str(tmp_path), server.url, adapters, timeout=1200)[0]
        assert len(seconds) == STEPS
        if adapters == "alone":
            name = ServedAdapters(server.url, str(tmp_path / "versions"), str(tmp_path / "adapters")).load(STEPS + 1)
        else:
            load_version(ServedEngine(server.url), STEPS + 1)
            name = ""
        found = [one["token_ids"] for one in ask(server, name, prompts)]
    model = load_trained(tmp_path, adapters)
    assert found == [greedy(model, prompt) for prompt in prompts]
    assert found != before
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollout.jsonl").read_text().splitlines()]
    sizes = [row["rollout_bytes"] for row in rows]
    whole = sum(parameter.nbytes for parameter in make_model("Llama").bfloat16().parameters())
    print(f"{adapters}: {fmean(seconds[1:]):.2f} s and {fmean(sizes[1:]):.0f} of {whole} bytes for a version")


def ask(server: Served, name: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Return the greedy choice for each prompt."""
    body = {"model": name or None, "prompt": prompts, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return server.ask("v1/completions", {key: value for key, value in body.items() if value is not None})
