"""A small model with Ulysses attention on two sequence-parallel ranks, with and without `activations.sequence`."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from tests.support import activations
from tests.support.jobs import make_engine, train_on

RANKS, LAYERS = 2, 2
HEADS, KEY_HEADS, HEAD_SIZE, VOCABULARY = 4, 2, 16, 64
ROWS, LENGTH = 3, 16
"""Sequences of a batch, and tokens of each, of which a rank has its share."""


@dataclass(frozen=True)
class Job(activations.Job):
    """Training run on two sequence-parallel ranks, with a replica for each further two.

    Attributes:
        reentrant: kind of activation checkpointing; None for no checkpointing.
    """

    rows = ROWS
    zero = MappingProxyType({"stage3_param_persistence_threshold": 0})
    reentrant: bool | None = None


def register() -> Any:
    """Give attention of transformers to Ulysses, once in a process, and return its `mpu`."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed("gloo")
    return UlyssesSPAttentionHF.register_with_transformers(_model(), "sdpa", RANKS, ROWS)


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "attn_implementation": "sdpa"}
    sizes = {"hidden_size": HEADS * HEAD_SIZE, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, vocab_size=VOCABULARY))


def start(job: Job, mpu: Any) -> Any:
    """Return an engine for a Llama with grouped-query attention."""
    model = _model()
    if job.reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": job.reentrant})
    return make_engine(model, job.config(), mpu=mpu)


def share(seed: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the tokens of this rank, and their positions."""
    whole = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    part = slice(rank * LENGTH // RANKS, (rank + 1) * LENGTH // RANKS)
    return whole[:, part], torch.arange(LENGTH)[part].expand(ROWS, -1)


def loss_of(model: nn.Module, seed: int, rank: int) -> Tensor:
    """Return the mean loss of the tokens of this rank, each of which predicts itself."""
    tokens, positions = share(seed, rank)
    logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), (tokens.flatten() * 7 + 3) % VOCABULARY)


def train(engine: Any, rank: int, steps: int = 2) -> list[float]:
    """Return the losses of `steps` optimizer steps."""
    return [train_on(engine, loss_of(engine, step, rank % RANKS)) for step in range(steps)]
