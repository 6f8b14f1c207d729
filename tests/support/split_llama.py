"""A small Llama that AutoTP splits over two ranks, with and without the section `activations`."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from tests.support import activations
from tests.support.jobs import make_engine, train_on

LAYERS = 2
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": 64}
ROWS, LENGTH = 3, 8


@dataclass(frozen=True)
class Job(activations.Job):
    """Training run of the model on two tensor-parallel ranks, with a replica for each further two.

    Attributes:
        reentrant: kind of activation checkpointing; None for no checkpointing.
        frozen: part of the names of parameters without gradients.
    """

    rows = ROWS
    zero = MappingProxyType({"stage3_param_persistence_threshold": 0})
    layout = MappingProxyType({"tensor_parallel": {"autotp_size": 2}})
    reentrant: bool | None = None
    frozen: str = ""


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
    return make_engine(model, job.config(), [one for one in model.parameters() if one.requires_grad])


def tokens(seed: int) -> Tensor:
    return torch.randint(0, SIZES["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
    return loss


def train(engine: Any, steps: int = 2, first: int = 0) -> list[float]:
    """Return the losses of `steps` optimizer steps."""
    return [train_on(engine, loss_of(engine, tokens(step))) for step in range(first, first + steps)]


def replicated(found: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Return those of the parameters that all tensor-parallel ranks hold."""
    whole = ("norm.weight", "layernorm.weight", "o_proj.bias", "down_proj.bias")
    return {name: value for name, value in found.items() if name.endswith(whole)}
