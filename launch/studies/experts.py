#!/usr/bin/env python3
"""Train a small mixture of experts with DeepSpeed's layer, uncompressed and with compressed gradients or tokens.

    torchrun --nproc_per_node 2 -m launch.studies.experts --data data/shakespeare
    torchrun --nproc_per_node 2 -m launch.studies.experts --data data/shakespeare --ep-size 2 --compress tokens

The model predicts bytes of a text. All runs of a seed start from the same weights and see the same batches. With
`--ep-size 1`, each rank holds all experts, whose gradients travel; with 2, each of two ranks holds half of them: only
the other gradients travel, and tokens do. The held-out loss is the mean over both ranks, computed without compression.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import deepspeed_compress
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.training.data.corpus import text_files
from launch.studies.harness import new_parser

WIDTH, TOKENS, LAYERS = 128, 64, 2
HELD_OUT = 32
"""Number of held-out batches of each rank."""
BALANCE = 0.01
"""Weight of the loss that balances the load of the experts."""
Sections = Mapping[str, Mapping[str, Any]]
UNCOMPRESSED: Sections = MappingProxyType({"uncompressed": {"gradients": {"method": "none"}}})


def _tokens(dispatch: int, combine: int) -> Mapping[str, Any]:
    experts = {"dispatch": {"bits": dispatch}, "combine": {"bits": combine}}
    return {"gradients": {"method": "none"}, "activations": {"experts": experts}}


SECTIONS: Mapping[str, Sections] = {
    "gradients": {**UNCOMPRESSED, "4 bits": {"gradients": {"bits": 4}}},
    "tokens": {
        **UNCOMPRESSED,
        "8 bits": _tokens(8, 8),
        "4 bits to the experts, 8 bits back": _tokens(4, 8),
        "4 bits": _tokens(4, 4),
    },
}
"""Sections that are compared, by what is compressed."""


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


def train(options: argparse.Namespace, section: Mapping[str, Any], text: Tensor, seed: int) -> tuple[float, Any]:
    """Train one run. Return its held-out loss, and the figures of the last measured step (None except on rank 0)."""
    torch.manual_seed(seed)
    model = Mixture(options.experts, options.ep_size)
    given = {"params": list(model.parameters()), "name": "all"}
    groups = split_params_into_different_moe_groups_for_optimizer(given)
    config = _config(options, section)
    engine = deepspeed_compress.initialize(model=model, model_parameters=groups, config=config)[0]
    figures: list[Any] = []
    engine.compression.subscribe(figures.append)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(options.steps):
        loss, balance = engine(_batch(text[: -len(text) // 10], options.sequences, generator))
        engine.backward(loss + BALANCE * balance)
        engine.step()
    found = _held_out(engine, text[-len(text) // 10 :], options.sequences)
    engine.destroy()
    return found, figures[-1] if figures else None


def _config(options: argparse.Namespace, section: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": options.sequences,
        "steps_per_print": 10**6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.stage},
        "deepspeed_compress": {**section, "monitor": {"every": min(50, options.steps)}},
    }


def _batch(text: Tensor, sequences: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - TOKENS - 1, (sequences,), generator=generator)
    return torch.stack([text[start : start + TOKENS + 1] for start in starts.tolist()]).long()


@torch.no_grad()
def _held_out(engine: Any, text: Tensor, sequences: int) -> float:
    generator = torch.Generator().manual_seed(dist.get_rank())
    engine.eval()
    losses = torch.stack([engine(_batch(text, sequences, generator))[0] for _ in range(HELD_OUT)]).mean()
    dist.all_reduce(losses)
    return float(losses) / dist.get_world_size()


def _describe(name: str, losses: list[float], plain: list[float], figures: Any) -> str:
    """Return a line with the loss relative to `plain` (mean and standard error over seeds), and the bytes of a step."""
    changes = [100 * (loss / other - 1) for loss, other in zip(losses, plain, strict=True)]
    error = stdev(changes) / len(changes) ** 0.5 if len(changes) > 1 else 0.0
    tokens = figures.bytes_experts, figures.bytes_experts + figures.bytes_experts_saved
    return (
        f"{name}: held-out loss {fmean(losses):.4f} ({fmean(changes):+.2f} ± {error:.2f} %); gradients "
        f"{figures.bytes_sent:,} bytes a step of {figures.bytes_uncompressed:,}, tokens {tokens[0]:,} of {tokens[1]:,}"
    )


def main() -> None:
    """Train all runs, and print their losses on rank 0."""
    parser = new_parser(__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text files or directories")
    parser.add_argument("--compress", choices=tuple(SECTIONS), default="gradients", help="(default: gradients)")
    parser.add_argument("--steps", type=positive_integer, default=300, help="(default: 300)")
    parser.add_argument("--sequences", type=positive_integer, default=8, help="sequences of a rank (default: 8)")
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), default=1, help="ZeRO stage (default: 1)")
    parser.add_argument("--experts", type=positive_integer, default=4, help="experts in each layer (default: 4)")
    parser.add_argument("--ep-size", type=positive_integer, default=1, help="ranks that share the experts (default: 1)")
    parser.add_argument("--seeds", type=positive_integer, default=1, help="number of seeds (default: 1)")
    options = parser.parse_args()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed("gloo")
    read = b"".join(file.read_bytes() for file in text_files(options.data))
    text = torch.frombuffer(bytearray(read), dtype=torch.uint8)
    plain: list[float] = []
    for name, section in SECTIONS[options.compress].items():
        runs = [train(options, section, text, seed) for seed in range(options.seeds)]
        losses = [loss for loss, _ in runs]
        plain = plain or losses
        if dist.get_rank() == 0:
            print(_describe(name, losses, plain, runs[-1][1]), flush=True)


if __name__ == "__main__":
    main()
