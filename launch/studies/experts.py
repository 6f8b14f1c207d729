#!/usr/bin/env python3
"""Train a small mixture of experts with DeepSpeed's layer, with gradients uncompressed and in 4 bits.

    torchrun --nproc_per_node 2 -m launch.studies.experts --data data/shakespeare

The model predicts bytes of a text. Both runs start from the same weights and see the same batches. With `--ep-size 1`,
each rank holds all experts, whose gradients travel; with 2, each of two ranks holds half of them, and only the other
gradients travel. The held-out loss is the mean over both ranks.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import deepspeed_compress
from deepspeed_compress.config.numbers import change
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.training.data import text_files

WIDTH, TOKENS, SEQUENCES, LAYERS = 128, 64, 8, 2
HELD_OUT = 32
"""Number of held-out batches of each rank."""
BALANCE = 0.01
"""Weight of the loss that balances the load of the experts."""
SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "uncompressed": {"gradients": {"method": "none"}},
    "4 bits": {"gradients": {"bits": 4}},
}


class Block(nn.Module):
    """A transformer layer whose feed-forward part is a mixture of experts."""

    def __init__(self, experts: int, ep_size: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        expert = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.experts = MoE(WIDTH, expert, num_experts=experts, ep_size=ep_size, k=1, capacity_factor=2.0)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the loss that balances the load of the experts."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        y, balance, _ = self.experts(self.norms[1](x))
        return x + y, balance


class Mixture(nn.Module):
    """Language model of bytes. It returns its loss on a batch, and the loss that balances the load of the experts."""

    def __init__(self, experts: int, ep_size: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(experts, ep_size) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
        self.register_buffer("mask", torch.full((TOKENS, TOKENS), float("-inf")).triu(1), persistent=False)

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return both losses on `batch` (int64 [sequences, TOKENS + 1])."""
        x = self.tokens(batch[:, :-1]) + self.places.weight
        balance = x.new_zeros(())
        for block in self.blocks:
            x, more = block(x, self.mask)
            balance = balance + more
        return cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten()), balance


def train(options: argparse.Namespace, section: Mapping[str, Any], text: Tensor) -> tuple[float, float]:
    """Train one run. Return its held-out loss, and the ratio of uncompressed to sent gradient bytes."""
    torch.manual_seed(options.seed)
    model = Mixture(options.experts, options.ep_size)
    given = {"params": list(model.parameters()), "name": "all"}
    groups = split_params_into_different_moe_groups_for_optimizer(given)
    config = _config(options, section)
    engine = deepspeed_compress.initialize(model=model, model_parameters=groups, config=config)[0]
    figures: list[Any] = []
    engine.compression.subscribe(figures.append)
    generator = torch.Generator().manual_seed(1000 * options.seed + dist.get_rank())
    for _ in range(options.steps):
        loss, balance = engine(_batch(text[: -len(text) // 10], generator))
        engine.backward(loss + BALANCE * balance)
        engine.step()
    found = _held_out(engine, text[-len(text) // 10 :])
    engine.destroy()
    return found, figures[-1].ratio if figures else 1.0


def _config(options: argparse.Namespace, section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "steps_per_print": 10**6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.stage},
        "deepspeed_compress": {**section, "monitor": {"every": 50}},
    }


def _batch(text: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - TOKENS - 1, (SEQUENCES,), generator=generator)
    return torch.stack([text[start : start + TOKENS + 1] for start in starts.tolist()]).long()


@torch.no_grad()
def _held_out(engine: Any, text: Tensor) -> float:
    generator = torch.Generator().manual_seed(dist.get_rank())
    engine.eval()
    losses = torch.stack([engine(_batch(text, generator))[0] for _ in range(HELD_OUT)]).mean()
    dist.all_reduce(losses)
    return float(losses) / dist.get_world_size()


def main() -> None:
    """Train all runs, and print their losses on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text files or directories")
    parser.add_argument("--steps", type=positive_integer, default=300, help="(default: 300)")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), default=1, help="ZeRO stage (default: 1)")
    parser.add_argument("--experts", type=positive_integer, default=4, help="experts in each layer (default: 4)")
    parser.add_argument("--ep-size", type=positive_integer, default=1, help="ranks that share the experts (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed("gloo")
    read = b"".join(file.read_bytes() for file in text_files(options.data))
    text, first = torch.frombuffer(bytearray(read), dtype=torch.uint8), None
    for name, section in SECTIONS.items():
        loss, ratio = train(options, section, text)
        first = first or loss
        if dist.get_rank() == 0:
            print(f"{name}: held-out loss {loss:.4f} ({change(loss / first - 1)}), {ratio:.2f} times fewer bytes")


if __name__ == "__main__":
    main()
