"""Programs that train mixtures of experts: of DeepSpeed's own layer, and of layers that know nothing of DeepSpeed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn

from tests.backends.deepspeed.programs.program import WIDTH, Program, Run
from tests.support.methods import FP32_SUMS


class Experts(nn.Module):
    """DeepSpeed's layer. With `spread` s, each of s ranks holds a part of the experts."""

    def __init__(self, spread: int, count: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.experts = MoE(16, nn.Linear(16, 16), num_experts=count, ep_size=spread, k=1, min_capacity=0, use_rts=False)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts(self.first(x))[0])


class WithExperts:
    """Layers with each of the sizes of `spread`; experts have parameter groups of their own."""

    def __init__(self, *spread: int) -> None:
        self.spread = spread

    def __call__(self, run: Run) -> None:
        layers = [nn.Sequential(Experts(size, count=4), nn.Linear(1, WIDTH)) for size in self.spread]
        model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
        given = {"params": list(model.parameters()), "name": "all"}
        run.learn(run.start(model, model_parameters=split_params_into_different_moe_groups_for_optimizer(given)))


class Routed(nn.Module):
    """Each input takes one of the experts, the others do not run: on some rank, some get no gradient."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(17, count)
        self.experts = nn.ModuleList(nn.Linear(17, 17) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(dim=-1).max(dim=-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = chosen == index
            out[rows] = weights[rows, None] * self.experts[index](x[rows])
        return x + out


def routed(run: Run) -> None:
    """Experts that see no input on a rank."""
    model = nn.Sequential(nn.Linear(WIDTH, 17), Routed(), nn.Linear(17, 1))
    if run.stage == 3:
        set_z3_leaf_modules(model, [Routed])
    run.learn(run.start(model), steps=4)


SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32, "num_experts_per_tok": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, **HEADS, intermediate_size=24, num_local_experts=8))


def qwen3() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"moe_intermediate_size": 8, "num_experts": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **experts, intermediate_size=24))


class Registry(dict[str, Any]):
    """The registry as AutoEP of DeepSpeed 0.19.8 expects it: that of transformers 5.23 knows no default."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key if isinstance(key, str) else str(type(key)), {} if default is None else default)


def registry_with_defaults() -> AbstractContextManager[object]:
    from transformers.utils import output_capturing

    return patch.object(output_capturing, "_CAN_RECORD_REGISTRY", Registry(output_capturing._CAN_RECORD_REGISTRY))


class Mixture:
    """A model of transformers whose experts are parameters like all others; few tokens, so some experts see none."""

    def __init__(self, make: Callable[[], nn.Module], spread: bool = False) -> None:
        self.make, self.spread = make, spread

    def __call__(self, run: Run) -> None:
        model = self.make()
        if run.stage == 3 and not self.spread:
            set_z3_leaf_modules(model, [type(layer.mlp) for layer in model.model.layers[:1]])
        with registry_with_defaults():
            engine = run.start(model)
        generator = torch.Generator().manual_seed(run.rank)
        for _ in range(4):
            tokens = torch.randint(0, 32, (1, 5), generator=generator)
            router = not self.spread
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=router).loss
            run.keep("loss", loss)
            engine.backward(loss)
            run.step(engine)


AUTO_EP = {"expert_parallel": {"enabled": True, "autoep_size": 2, "use_grouped_mm": False}}
NOT_IN_ZERO_3 = {3: "not supported with ZeRO Stage 3"}
OF_LAYERS = {"alone": True, "fails": NOT_IN_ZERO_3}
ON_FOUR = {"ranks": 4, "rounded": True, **OF_LAYERS}

PROGRAMS = (
    Program("experts on each rank", WithExperts(1), **OF_LAYERS),
    Program("experts spread over ranks", WithExperts(2), **OF_LAYERS),
    Program("experts spread over 2 of 4 ranks", WithExperts(2), **ON_FOUR),
    Program("experts spread over 1, 2 and 4 ranks", WithExperts(2, 1, 4), **ON_FOUR),
    Program(
        "experts spread over ranks, bf16, sums in fp32",
        WithExperts(2),
        config=FP32_SUMS,
        rounded=True,
        alone=True,
        fails={0: "unsupported mix of model_dtype", **NOT_IN_ZERO_3},
    ),
    # Under ZeRO 1 and 2, DeepSpeed hangs if a parameter has a gradient on some ranks only.
    Program("experts without an input on a rank", routed, stages=(0, 3)),
    Program("mixture of transformers: Mixtral", Mixture(mixtral)),
    Program("mixture of transformers: Qwen3-MoE", Mixture(qwen3)),
    Program("AutoEP 2 x data 2", Mixture(mixtral, spread=True), config=AUTO_EP, ranks=4, rounded=True, alone=True),
)
