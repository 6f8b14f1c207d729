"""Small mixtures of experts that are spread over ranks: DeepSpeed's layer, and one of transformers with AutoEP."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint as checkpoint_of_deepspeed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.backends.deepspeed.programs.experts import registry_with_defaults
from tests.support import activations
from tests.support.jobs import make_engine, train_on

WIDTH, ROWS = 64, 12
AUTO_EP: Mapping[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": 2, "use_grouped_mm": False}}
SPREAD_OVER_TWO: Mapping[str, Any] = {"num_experts": 4, "ep_size": 2}


class Layers(nn.Module):
    """Three linear layers with two layers of experts between them, which may be recomputed.

    Attributes:
        recompute: kind of activation checkpointing: "", "reentrant", "other", or "deepspeed".
    """

    def __init__(self, spread: Mapping[str, Any], recompute: str = "") -> None:
        super().__init__()
        options: dict[str, Any] = {"k": 2, "min_capacity": 0, "top2_2nd_expert_sampling": False, **spread}
        self.first, self.last, self.recompute = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), recompute
        self.experts = nn.ModuleList(MoE(WIDTH, nn.Linear(WIDTH, WIDTH), **options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.experts:
            x = x + self._run(layer, x).tanh()
        return self.last(x)  # type: ignore[no-any-return]  # torch returns Any

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return layer(x)[0]  # type: ignore[no-any-return]  # torch returns Any

        if self.recompute == "deepspeed":
            return checkpoint_of_deepspeed(run, x)  # type: ignore[no-any-return]  # torch returns Any
        if self.recompute:
            return checkpoint(run, x, use_reentrant=self.recompute == "reentrant")  # type: ignore[no-any-return]  # torch returns Any
        return run(x)


@dataclass(frozen=True)
class Job(activations.Job):
    """Training run of `Layers`.

    Attributes:
        recompute: see `Layers`.
        spread: options of DeepSpeed's layers.
    """

    rows = ROWS
    recompute: str = ""
    spread: Mapping[str, Any] = field(default_factory=lambda: SPREAD_OVER_TWO)


def start(job: Job) -> Any:
    """Return an engine for `Layers`."""
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Layers(job.spread, job.recompute)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    return make_engine(model, job.config(), groups)


def batch(seed: int) -> Tensor:
    """Return a batch that depends on the rank."""
    rank = torch.distributed.get_rank()
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))


def loss_of(model: Any, x: Tensor) -> Tensor:
    output: Tensor = model(x.to(next(model.parameters()).dtype))
    return (output.float() - x[:, :1]).square().mean()


def step(engine: Any, number: int) -> float:
    """Train one step on the batch `number`, and return the loss."""
    return train_on(engine, loss_of(engine, batch(number)))


def start_mixtral(job: Job) -> Any:
    """Return an engine for a small Mixtral, whose experts AutoEP spreads over two ranks."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2, "num_local_experts": 8}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
    with registry_with_defaults():
        return make_engine(model, {**job.config(), **AUTO_EP})


def step_mixtral(engine: Any, number: int) -> float:
    """Train one step on few tokens, so some experts see none, and return the loss."""
    generator = torch.Generator().manual_seed(100 * number + engine.global_rank)
    tokens = torch.randint(0, 32, (1, 5), generator=generator)
    return train_on(engine, engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
