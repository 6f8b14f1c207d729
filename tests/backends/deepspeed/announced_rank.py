"""Program of a rank that fine-tunes a small Llama in several ways, on emulated hosts.

The first rank prints a line of JSON: for each case, the startup line, and the bytes that its host sends in a forward
pass and in a step.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed_compress
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.step import HEADER_BYTES
from tests.backends.deepspeed.test_frozen_weights import of_bitsandbytes

WORDS, LENGTH, STEPS = 256, 16, 2
FORGETFUL = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
"""Keys with which ZeRO 3 gathers every weight in forward and again in backward, as it does with large models."""
SECTIONS: dict[str, dict[str, Any]] = {
    "none": {"gradients": {"method": "none"}},
    "4 bits": {"gradients": {"bits": 4}},
    "weights": {"gradients": {"bits": 4}, "weights": {"bits": 8}},
}


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 384, "intermediate_size": 1056, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, tie_word_embeddings=False))


def lora(model: nn.Module) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=64, target_modules="all-linear"))


def qlora(model: nn.Module) -> nn.Module:
    for name, layer in list(model.model.layers.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, last = name.rpartition(".")
            setattr(model.model.layers.get_submodule(parent), last, of_bitsandbytes(layer, torch.uint8))
    model.is_loaded_in_4bit = True
    return lora(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False))


def partly_frozen(model: nn.Module) -> nn.Module:
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(False)
    return model


MODELS = {"LoRA": lora, "QLoRA": qlora, "partly frozen": partly_frozen}


def measured(model: nn.Module, stage: int, section: dict[str, Any]) -> tuple[str, float, float]:
    """Return the startup line, and the bytes without headers that this host sends in a forward pass and in a step."""
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, **(FORGETFUL if stage == 3 else {})},
        "deepspeed_compress": section,
    }
    with contextlib.redirect_stderr(io.StringIO()) as written:
        engine = deepspeed_compress.initialize(model=model, config=ds_config)[0]
    train(engine)
    train(engine)  # ZeRO 3 has recorded the order of the layers now
    forward = sent_by(lambda: infer(engine))
    # ZeRO 3 forgets the recorded order after a forward pass alone.
    train(engine)
    train(engine)
    step = sent_by(lambda: train(engine))
    engine.destroy()
    return written.getvalue().strip(), forward, step


def sent_by(work: Callable[[], object]) -> float:
    before = gauges.quiet_counters()
    for _ in range(STEPS):
        work()
    after = gauges.quiet_counters()
    sent = {name: (after[name] - before[name]) / STEPS for name in after}
    return sent["interface"] - HEADER_BYTES * sent["packets"]


def infer(engine: Any) -> None:
    """Compute a loss in training mode, in which weights are rounded."""
    tokens = torch.randint(WORDS, (1, LENGTH))
    with torch.no_grad():
        engine(input_ids=tokens, labels=tokens)


def train(engine: Any) -> None:
    tokens = torch.randint(WORDS, (1, LENGTH))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def cases(within: bool) -> Iterator[tuple[str, int, str]]:
    for kind in MODELS:
        for stage in (1, 2, 3) if within else (0, 1, 2, 3):
            yield from ((kind, stage, name) for name in SECTIONS if not (name == "weights" and (stage == 0 or within)))


def main(within: bool) -> None:
    gauges.join()
    results = []
    for kind, stage, name in cases(within):
        section = {**SECTIONS[name], **({"parallelism": {"shard_within": "node"}} if within else {})}
        results.append((kind, stage, name, *measured(MODELS[kind](llama()), stage, section)))
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(bool(int(sys.argv[1])))
