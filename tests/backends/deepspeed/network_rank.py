"""Program of a rank that trains a small GPT on predictable sequences.

Rank 0 prints "done N" after each step. At the end, each rank prints a line of JSON with the settings of every step, the
events, and the loss on held-out sequences.
"""

import json
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config

import deepspeed_compress

WORDS, LENGTH, SEQUENCES = 512, 128, 8
MODEL = partial(
    GPT2Config,
    vocab_size=WORDS,
    n_positions=LENGTH,
    n_layer=2,
    n_head=4,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
    bos_token_id=0,
    eos_token_id=0,
)


def sequences(count: int, seed: int) -> torch.Tensor:
    """Return sequences in which each word follows from the previous one, except for one word in ten."""
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randperm(WORDS, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(WORDS, (count, LENGTH), generator=generator)
    keep = torch.rand(count, LENGTH, generator=generator) < 0.1
    for place in range(1, LENGTH):
        tokens[:, place] = torch.where(keep[:, place], tokens[:, place], follows[tokens[:, place - 1]])
    return tokens


def start(section: dict[str, Any], width: int = 256) -> Any:
    """Return an engine for a model of width `width`."""
    torch.manual_seed(0)
    ds_config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        # Use a single bucket. Its messages are sent after backward, so that nothing hides a slow link.
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 10**8},
        "deepspeed_compress": section,
    }
    model = AutoModelForCausalLM.from_config(MODEL(n_embd=width))
    return deepspeed_compress.initialize(model=model, config=ds_config)[0]


def train(engine: Any, step: int, count: int = SEQUENCES, factor: float = 1.0) -> None:
    """Train one step on `count` sequences per rank. The loss is multiplied by `factor`."""
    tokens = sequences(count, 1 + step * dist.get_world_size() + dist.get_rank())
    engine.backward(engine(input_ids=tokens, labels=tokens).loss * factor)
    engine.step()


def evaluate(engine: Any) -> float:
    """Return the mean loss on held-out sequences."""
    engine.eval()
    with torch.no_grad():
        tokens = sequences(64, 10**6)
        return float(engine(input_ids=tokens, labels=tokens).loss)


def main(steps: int, section: dict[str, Any]) -> None:
    engine, settings = start(section), []
    for step in range(steps):
        settings.append(engine.compression.settings)
        train(engine, step)
        if dist.get_rank() == 0:
            print("done", step + 1, flush=True)
    events = [[event.step, event.kind, event.before, event.after] for event in engine.compression.events]
    print(json.dumps({"settings": settings, "events": events, "loss": evaluate(engine)}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
