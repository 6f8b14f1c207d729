"""Text from the trained model."""

from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from deepspeed_compress.models import whole_logits

TEMPERATURE = 0.8
TOP_K = 40


def sample_text(engine: Any, tokenizer: Tokenizer, prompt: Tensor, count: int, context: int, seed: int) -> str:
    """`prompt` (n,) continued by `count` tokens, as text.

    Every rank must call this with the same arguments: with ZeRO 3 each forward gathers weights from all. No
    key-value cache is used, and at most `context` tokens are looked back at.
    """
    engine.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt[None]
    for _ in range(count):
        with torch.no_grad(), whole_logits(engine.module):
            logits = engine(input_ids=tokens[:, -context:], use_cache=False).logits[0, -1]
        tokens = torch.cat([tokens, _draw(logits, generator).to(tokens.device)[None]], dim=1)
    return str(tokenizer.decode(tokens[0].tolist()))


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """One of the TOP_K likeliest tokens, (1,); rank 0 decides, so that ranks cannot part."""
    best = logits.float().cpu().topk(min(TOP_K, logits.numel()))
    chosen = torch.multinomial((best.values / TEMPERATURE).softmax(0), 1, generator=generator)
    drawn = best.indices[chosen].to(logits.device)
    dist.broadcast(drawn, src=0)
    return drawn
