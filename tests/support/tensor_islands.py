"""Engines whose ranks share layers (AutoTP): their model, and steps of training."""

from collections.abc import Mapping
from typing import Any

import torch

from tests.support.jobs import BATCH, Job, make_engine, train_on

TENSOR = 2
AUTO_TP: Mapping[str, Any] = {"tensor_parallel": {"autotp_size": TENSOR}}
VOCABULARY = 62


def llama(heads: int = 3) -> Any:
    """Return a model of which one of two ranks has two of three key heads, so their buffers are cut differently."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 36, "intermediate_size": 42, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=heads))


def start_tensor(job: Job) -> Any:
    """Return the engine of `job`."""
    return make_engine(llama(), job.config())


def take_steps(engine: Any, rank: int, job: Job, first: int = 0, last: int | None = None) -> list[float]:
    """Take steps `first` to `last`, and return their losses. Ranks that share layers read the same data."""
    generator = torch.Generator().manual_seed(100 + rank // TENSOR)
    batches = [torch.randint(0, VOCABULARY, (BATCH, 8), generator=generator) for _ in range(job.steps)]
    return [
        train_on(engine, engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
        for tokens in batches[first:last]
    ]
