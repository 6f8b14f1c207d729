"""Islands whose ranks share layers (AutoTP): their model, and steps of training."""

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch

import deepspeed_compress
from tests.support.jobs import BATCH, Job

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
    model = llama()
    initialize = deepspeed.initialize if job.section is None else deepspeed_compress.initialize
    return initialize(model=model, model_parameters=list(model.parameters()), config=job.config())[0]


def take_steps(engine: Any, rank: int, job: Job, first: int = 0, last: int | None = None) -> list[float]:
    """Take steps `first` to `last`, and return their losses. Ranks that share layers read the same data."""
    generator = torch.Generator().manual_seed(100 + rank // TENSOR)
    batches, losses = [torch.randint(0, VOCABULARY, (BATCH, 8), generator=generator) for _ in range(job.steps)], []
    for tokens in batches[first:last]:
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses
