"""Trainers of TRL: supervised fine-tuning and GRPO. They need the extra `trl`."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import deepspeed_compress
from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.rollout import DirectoryStore, Receiver, open_store
from deepspeed_compress.rollout.module_weights import make_holder
from launch.agents.sampler import complete
from tests.integrations.trainers import AUTO, INT4, LENGTH, WORDS, forget_accelerate, network, sentences
from tests.support import http_servers
from tests.support.forks import run_forks
from tests.support.http_servers import serving
from tests.support.jobs import weights

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: pip install trl")
NONE = {"gradients": {"method": "none"}}


def tokenizer() -> Any:
    """Return a tokenizer with one token per number, and tokens for padding and the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(WORDS - 2)} | {"<pad>": WORDS - 2, "<end>": WORDS - 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", padding_side="left")


def settings(directory: str, section: dict[str, Any] | None) -> dict[str, Any]:
    config = {**AUTO, "zero_optimization": {"stage": 2}}
    return {
        "output_dir": directory,
        "deepspeed": config if section is None else {**config, "deepspeed_compress": section},
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "gradient_checkpointing": False,
    }


def sft(directory: str, section: dict[str, Any] | None) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(map(str, row["input_ids"])) for row in sentences(32)]
    args = SFTConfig(**settings(directory, section), max_length=LENGTH)
    rows = Dataset.from_dict({"text": texts})
    return SFTTrainer(network("llama"), args, train_dataset=rows, processing_class=tokenizer())


def small_numbers(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion: the share of numbers in the lower half of the vocabulary."""
    return [sum(int(word) < WORDS // 2 for word in text.split() if word.isdigit()) / 8 for text in completions]


def grpo(directory: str, section: dict[str, Any] | None, adapter: Any = None, **options: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = Dataset.from_dict({"prompt": [f"{number} {number + 1}" for number in range(16)]})
    args = GRPOConfig(**settings(directory, section), **options, num_generations=4, max_completion_length=8)
    others = {"processing_class": tokenizer(), "peft_config": adapter}
    return GRPOTrainer(network("llama"), small_numbers, args, train_dataset=rows, **others)


def dpo(directory: str, section: dict[str, Any] | None) -> Any:
    """Return a trainer with a reference model, to whose engine TRL gives a copy of the configuration with stage 0."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    numbers = range(32)
    columns = {
        "prompt": ["1 2" for _ in numbers],
        "chosen": [f"{number} 3" for number in numbers],
        "rejected": ["4 5"] * 32,
    }
    args = DPOConfig(**settings(directory, section))
    rows = Dataset.from_dict(columns)
    models = network("llama"), network("llama")
    return DPOTrainer(*models, args=args, train_dataset=rows, processing_class=tokenizer())


MAKERS = {"sft": sft, "grpo": grpo, "dpo": dpo}


def train(rank: int, kind: str, directory: str) -> list[tuple[list[dict[str, Any]], Any]]:
    """Return the logs and parameters of training without this package, with method "none", and with 4 bits."""
    outcomes = []
    for section in (None, NONE, INT4):
        uninstall = deepspeed_compress.install() if section is not None else lambda: None
        trainer = MAKERS[kind](directory, section)
        trainer.train()
        outcomes.append((trainer.state.log_history, weights(trainer.model_wrapped)))
        uninstall()
        trainer.model_wrapped.destroy()
        forget_accelerate()
    return outcomes


@pytest.mark.parametrize("kind", MAKERS)
def test_none_matches_trl_alone_and_four_bits_train(kind: str, tmp_path: Path) -> None:
    ranks = run_forks(2, train, kind, str(tmp_path))
    for alone, none, int4 in ranks:
        assert none[1] == alone[1]
        assert int4[1] != alone[1]
    logs = [entry for entry in ranks[0][2][0] if "loss" in entry]
    assert len(logs) == 3
    assert min(entry["compression_ratio"] for entry in logs) > 12


def with_reference(rank: int, directory: str, *sections: dict[str, Any]) -> list[tuple[bool, bool]]:
    """Return whether the engines of the policy and of the reference model are attached to."""
    outcomes = []
    for section in sections:
        uninstall = deepspeed_compress.install()
        trainer = dpo(directory, section)
        trainer.train()
        outcomes.append(tuple("compression" in vars(one) for one in (trainer.model_wrapped, trainer.ref_model)))
        uninstall()
        trainer.model_wrapped.destroy()
        forget_accelerate()
    return outcomes


def test_the_engine_of_a_reference_model_is_left_alone(tmp_path: Path) -> None:
    """TRL sets ZeRO stage 0 for it, with which these keys cannot be combined."""
    sections = (
        {**INT4, "weights": {"bits": 8}},
        {**INT4, "ownership": "balanced"},
        {**INT4, "parallelism": {"shard_within": 2, "zero_stage": 2}},
    )
    assert run_forks(4, with_reference, str(tmp_path), *sections) == [[(True, False)] * 3] * 4


class Server(ThreadingHTTPServer):
    """The endpoints of a vLLM server that TRL and the package use. It holds the versions in a module.

    Attributes:
        adapters: models with the loaded adapters, by their names.
        calls: calls of endpoints that concern weights, and of completions, in order.
        labels: versions that the engine was told to be served, or names of adapters.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = network("llama").to(torch.bfloat16)
        self.adapters: dict[str, Any] = {}
        self.calls: list[str] = []
        self.labels: list[str] = []

    def call(self, route: str, body: dict[str, Any]) -> None:
        self.calls.append(route)
        if route == "/init_weight_transfer_engine":
            self.receiver = Receiver(self.model, open_store(body["init_info"]["place"]))
        elif route == "/update_weights":
            self.receiver.update(body["update_info"]["version"])
        elif route == "/finish_weight_update":
            self.labels.append(body["weight_version"])
        elif route == "/v1/load_lora_adapter":
            from peft import PeftModel

            self.labels.append(body["lora_name"])
            self.adapters[body["lora_name"]] = PeftModel.from_pretrained(network("llama"), body["lora_path"])
        elif route == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]

    def choices(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        self.calls.append("completions")
        model = self.adapters.get(request["model"], self.model)
        prompts = [one for one in request["prompt"] for _ in range(request["n"])]
        found = complete(model, tokenizer(), prompts, request["max_tokens"], request["temperature"])
        return [
            {
                "prompt_token_ids": prompt,
                "token_ids": one.tokens,
                "logprobs": {
                    "tokens": [f"token_id:{token}" for token in one.tokens],
                    "token_logprobs": one.logprobs,
                    "top_logprobs": [None] * len(one.tokens),
                },
            }
            for prompt, one in zip(prompts, found, strict=True)
        ]


class Handler(http_servers.Handler, BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        config = {"model_config": {"logprobs_mode": "processed_logprobs"}, "weight_transfer_config": None}
        answers = {"/health": {}, "/v1/models": {"data": [{"id": "policy"}]}, "/server_info": {"vllm_config": config}}
        self.answer(json.dumps(answers[self.path.partition("?")[0]]).encode())

    def do_POST(self) -> None:
        body, found = self.read_json(), {}
        if self.path == "/v1/completions":
            found = {"choices": self.server.choices(body)}
        else:
            self.server.call(self.path.partition("?")[0], body)
        self.answer(json.dumps(found).encode())


def pretend_vllm() -> None:
    """Let TRL believe that vLLM is installed. It then needs nothing else of it to talk to a server."""
    from trl.generation import vllm_client, vllm_generation

    vllm_client.is_vllm_available = vllm_generation.is_vllm_available = lambda: True


def train_with_server(rank: int, directory: str, url: str, adapters: str | None = None) -> Any:
    """Return the published weights, gathered: of the model, of its adapter, or merged."""
    from peft import LoraConfig

    from deepspeed_compress.integrations.trl import published_weights

    pretend_vllm()
    deepspeed_compress.install()
    versions = f"{directory}/versions"
    options: dict[str, Any] = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url}
    if adapters is not None:
        options["adapter"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    section = {**INT4, "rollout": {"directory": versions, "adapters": adapters}}
    with published_weights(versions, f"{directory}/adapters"):
        trainer = grpo(directory, section, **options)
    trainer.train()
    engine = trainer.model_wrapped
    engine.rollout.wait()
    if adapters == "merged":
        return {name: one.tolist() for name, one in engine.module.merge_and_unload().named_parameters()}
    return weights(engine)


UPDATE = [
    "/pause",
    *("/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"),
    *("/resume", "completions"),
]


@pytest.mark.parametrize("adapters", [None, "merged"])
def test_a_server_generates_with_the_published_weights_of_each_step(adapters: str | None, tmp_path: Path) -> None:
    with serving(server := Server()) as url:
        trained = run_forks(2, train_with_server, str(tmp_path), url, adapters)[0]
    assert server.calls == ["/init_weight_transfer_engine", *UPDATE * 3]
    assert server.labels == ["1", "2", "3"]
    assert server.receiver.update()
    assert server.receiver.version == 4
    for name, parameter in server.model.named_parameters():
        assert torch.equal(parameter.flatten(), torch.tensor(trained[name]).flatten().to(torch.bfloat16)), name


def test_a_server_generates_with_the_published_adapter_of_each_step(tmp_path: Path) -> None:
    with serving(server := Server()) as url:
        trained = run_forks(2, train_with_server, str(tmp_path), url, "alone")[0]
    load = ["/v1/load_lora_adapter", "completions"]
    assert server.calls == [*load, *load, load[0], "/v1/unload_lora_adapter", load[1]]
    assert server.labels == ["policy@1", "policy@2", "policy@3"]
    store = DirectoryStore(tmp_path / "versions")
    holder = make_holder(store)
    assert Receiver(holder, store).update(4)
    for name, parameter in holder.named_parameters():
        known = trained[name.replace(".weight", ".default.weight")]
        assert torch.equal(parameter.flatten(), torch.tensor(known).flatten().to(torch.bfloat16)), name


def refused(rank: int, directory: str, url: str) -> list[str]:
    from peft import LoraConfig

    from deepspeed_compress.integrations.trl import published_weights

    pretend_vllm()
    deepspeed_compress.install()
    found = []
    adapter, alone = LoraConfig(r=4, target_modules=["q_proj"]), {"directory": directory, "adapters": "alone"}
    for mode, section, chosen in (
        ("colocate", INT4, None),
        ("server", INT4, None),
        ("server", {**INT4, "rollout": {"directory": directory}}, adapter),
        ("server", {**INT4, "rollout": alone}, adapter),
    ):
        with pytest.raises((ConfigError, UnsupportedError)) as raised, published_weights(directory):
            grpo(directory, section, chosen, use_vllm=True, vllm_mode=mode, vllm_server_base_url=url).train()
        found.append(str(raised.value))
        forget_accelerate()
    return found


def test_what_no_server_can_follow_is_refused(tmp_path: Path) -> None:
    with serving(Server()) as url:
        found, *_ = run_forks(2, refused, str(tmp_path), url)
    colocated, unpublished, unclear, nowhere = found
    assert "vllm_mode is 'colocate', but only a server loads published weights" in colocated
    assert 'no weights are published; write "rollout"' in unpublished
    assert "is a name of PEFT, which no engine has" in unclear
    assert "adapters are published alone; write published_weights" in nowhere


def test_a_trainer_without_deepspeed_is_refused() -> None:
    from deepspeed_compress.integrations import trl

    generation: Any = SimpleNamespace(accelerator=SimpleNamespace(deepspeed_engine_wrapped=None))
    with pytest.raises(ConfigError, match="no weights are published"):
        trl._Generation.sync_weights(generation)
