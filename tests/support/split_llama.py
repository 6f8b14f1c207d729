"""A small Llama that AutoTP splits over two ranks, with and without the section `activations`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

import deepspeed_compress
from deepspeed_compress.config import SECTION

LAYERS = 2
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": 64}
ROWS, LENGTH = 3, 8


@dataclass(frozen=True)
class Job:
    """Training run of the model on two tensor-parallel ranks, with a replica for each further two.

    Attributes:
        activations: the key `activations`; None to train with DeepSpeed alone.
        stage: ZeRO stage.
        reentrant: kind of activation checkpointing; None for no checkpointing.
        frozen: part of the names of parameters without gradients.
        extra: other keys of the configuration.
        section: other keys of the section.
    """

    activations: Mapping[str, Any] | None = None
    stage: int = 1
    reentrant: bool | None = None
    frozen: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    section: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "steps_per_print": 10**6,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "tensor_parallel": {"autotp_size": 2},
            **self.extra,
        }
        if self.activations is None:
            return config
        section = {"gradients": {"method": "none"}, "activations": dict(self.activations), **self.section}
        return {**config, SECTION: section}


def start(job: Job) -> Any:
    """Return an engine for the model, which has biases that are not zero."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, **heads))
    if job.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": job.reentrant})
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
        parameter.requires_grad_(not (job.frozen and job.frozen in name))
    initialize = deepspeed.initialize if job.activations is None else deepspeed_compress.initialize
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return initialize(model=model, model_parameters=trained, config=job.config())[0]


def tokens(seed: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


def train(engine: Any, steps: int = 2, first: int = 0) -> list[float]:
    """Return the losses of `steps` optimizer steps."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(engine, tokens(step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def replicated(found: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return those of the parameters that all tensor-parallel ranks hold."""
    whole = ("norm.weight", "layernorm.weight", "o_proj.bias", "down_proj.bias")
    return {name: value for name, value in found.items() if name.endswith(whole)}
