"""Healthy training in one process, each run of another kind, with compressed gradients and a guard that looks on.

What a guard sees of them is real: norms that fall by decades in a warm-up, batches of one example, losses that go to
zero or change with the data, steps without any gradient. All gradients are compressed, with error feedback, where ranks
keep their own part exact.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.monitor import Event
from deepspeed_compress.policy import Observation, Policy

__all__ = ["CHANGING", "RUNS", "Fault", "Kind", "Outcome", "train"]

Task = Callable[[torch.Generator], tuple[nn.Module, Callable[[nn.Module, int], Tensor]]]
"""From random numbers to a model and its loss at a step."""
Fault = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From the step, the gradient and what is remembered to both, disturbed."""


@dataclass(frozen=True)
class Kind:
    """A run. `warmup`: steps in which the learning rate rises; `dense`: uncompressed steps; `clip`: 0 for none."""

    task: Task
    lr: float
    seed: int
    warmup: int = 0
    dense: int = 0
    clip: float = 1.0
    gradients: str = "4 bits"
    steps: int = 250


@dataclass(frozen=True)
class Outcome:
    """`skipped`: optimizer steps that the guard kept from being applied. `loss`: mean of the last tenth."""

    events: list[Event]
    skipped: int
    loss: float


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(functional.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.inner(self.norms[1](x))


def language(width: int, layers: int, batch: int, length: int = 12, topics: int = 1) -> Task:
    """A GPT on sequences of a random grammar; the grammar is another one in each of `topics` parts of the data."""

    def task(generator: torch.Generator) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
        words = 64
        follow = torch.stack([torch.randperm(words, generator=generator) for _ in range(topics)])
        model = nn.Sequential(
            nn.Embedding(words, width),
            *(Block(width) for _ in range(layers)),
            nn.LayerNorm(width),
            nn.Linear(width, words),
        )

        def loss(model: nn.Module, step: int) -> Tensor:
            text = [torch.randint(words, (batch,), generator=generator)]
            for _ in range(length):
                noise = torch.randint(words, (batch,), generator=generator)
                keep = torch.rand(batch, generator=generator) < 0.9
                text.append(torch.where(keep, follow[step // 100 % topics][text[-1]], noise))
            tokens = torch.stack(text, dim=1)
            return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

        return model, loss

    return task


def heavy_tails(batch: int) -> Task:
    """Regression on targets of which a few are far from the others."""

    def task(generator: torch.Generator) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

        def loss(model: nn.Module, step: int) -> Tensor:
            x = torch.randn(batch, 16, generator=generator)
            noise = torch.randn(batch, generator=generator) / torch.rand(batch, generator=generator).clamp_min(0.02)
            return functional.smooth_l1_loss(model(x).squeeze(1), x[:, :4].sum(dim=1) + noise)

        return model, loss

    return task


def memorised(examples: int, batch: int) -> Task:
    """Classes of a few examples, seen until the loss is nothing but its outliers."""

    def task(generator: torch.Generator) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
        data = torch.randn(examples, 20, generator=generator)
        classes = torch.randint(5, (examples,), generator=generator)
        model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))

        def loss(model: nn.Module, step: int) -> Tensor:
            chosen = torch.randint(examples, (batch,), generator=generator)
            return functional.cross_entropy(model(data[chosen]), classes[chosen])

        return model, loss

    return task


def rewards(batch: int) -> Task:
    """Choices that are judged against their group's mean: where all are judged alike, there is no gradient."""

    def task(generator: torch.Generator) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

        def loss(model: nn.Module, step: int) -> Tensor:
            x = torch.randn(8, generator=generator).expand(batch, 8)
            odds = model(x).log_softmax(dim=-1)
            choice = torch.multinomial(odds.detach().exp(), 1, generator=generator)
            reward = (choice.squeeze(1) == int(x[0, 0] > 0)).float()
            return -(odds.gather(1, choice).squeeze(1) * (reward - reward.mean())).mean()

        return model, loss

    return task


def recurrent(batch: int, length: int) -> Task:
    """A recurrent network, whose gradients now and then explode."""

    def task(generator: torch.Generator) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.cell, self.out = nn.RNN(4, 48, batch_first=True), nn.Linear(48, 1)
                with torch.no_grad():
                    self.cell.weight_hh_l0.mul_(2.0)

            def forward(self, x: Tensor) -> Tensor:
                return self.out(self.cell(x)[0][:, -1])  # type: ignore[no-any-return]

        def loss(model: nn.Module, step: int) -> Tensor:
            x = torch.randn(batch, length, 4, generator=generator)
            return functional.mse_loss(model(x), x[:, -2:, :1].sum(dim=1))

        return Net(), loss

    return task


RUNS: dict[str, Kind] = {
    "gpt": Kind(language(32, 2, 8), 3e-3, 0),
    "gpt, another seed": Kind(language(32, 2, 8), 3e-3, 1),
    "gpt, high rate at once": Kind(language(32, 2, 8), 3e-2, 2),
    "gpt, high rate, warm-up": Kind(language(32, 2, 8), 3e-2, 3, warmup=100),
    "gpt, low rate": Kind(language(32, 2, 8), 1e-4, 4, warmup=20),
    "gpt, long warm-up": Kind(language(32, 2, 8), 1e-2, 5, warmup=300),
    "gpt, dense start": Kind(language(32, 2, 8), 3e-3, 6, warmup=50, dense=50),
    "gpt, no clipping": Kind(language(32, 2, 8), 3e-3, 7, warmup=50, clip=0.0),
    "gpt, one sequence": Kind(language(32, 2, 1), 3e-3, 8, warmup=20),
    "gpt, deep and narrow": Kind(language(16, 6, 8), 1e-2, 9, warmup=50),
    "gpt, wide": Kind(language(96, 1, 8), 3e-3, 10, warmup=20),
    "gpt, 2 bits": Kind(language(32, 2, 8), 3e-3, 11, warmup=50, gradients="2 bits"),
    "gpt, top-k": Kind(language(32, 2, 8), 3e-3, 12, warmup=50, gradients="top-k"),
    "heavy tails": Kind(heavy_tails(16), 1e-3, 14),
    "heavy tails, single examples": Kind(heavy_tails(1), 1e-3, 15),
    "heavy tails, no clipping": Kind(heavy_tails(4), 1e-3, 16, clip=0.0),
    "memorised": Kind(memorised(60, 4), 3e-3, 17, steps=400),
    "memorised, one at a time": Kind(memorised(40, 1), 3e-3, 18, steps=400),
    "rewards": Kind(rewards(8), 3e-3, 19, steps=400),
    "rewards, small groups": Kind(rewards(3), 1e-2, 20, steps=400),
    "recurrent": Kind(recurrent(8, 20), 3e-3, 21, warmup=50),
    "recurrent, high rate": Kind(recurrent(4, 30), 1e-2, 22, warmup=100),
    "recurrent, signs": Kind(recurrent(8, 20), 3e-3, 23, gradients="signs"),
}
CHANGING = Kind(language(32, 2, 8, topics=4), 3e-3, 13, warmup=20)
"""Data of four kinds, one after the other: each is as new as the first."""
METHODS: dict[str, dict[str, Any]] = {
    "4 bits": {"bits": 4},
    "2 bits": {"bits": 2},
    "signs": {"method": "sign"},
    "top-k": {"method": "topk", "density": 0.05},
}
SEEN_EVERY = 50
"""Steps between looks at the residuals, as is the default."""


def train(kind: Kind, guard: dict[str, Any] | None, fault: Fault = lambda step, grad, kept: (grad, kept)) -> Outcome:
    """Train, by what the guard orders; None for no guard."""
    torch.manual_seed(kind.seed)
    generator = torch.Generator().manual_seed(kind.seed)
    model, loss_of = kind.task(generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=kind.lr, betas=(0.9, 0.95))
    section: dict[str, Any] = {"gradients": METHODS[kind.gradients], "schedule": {"warmup_steps": kind.dense}}
    events: list[Event] = []
    policy = Policy(parse_section({SECTION: {**section, "guard": guard}}), None, events.append)
    sender, losses, skipped, before = _Sender(sum(p.numel() for p in model.parameters())), [], 0, None
    plan = policy.begin(0)
    for step in range(kind.steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        flat, kept = fault(step, nn.utils.parameters_to_vector(p.grad for p in model.parameters()), sender.kept)
        sent, left = sender.send(flat, kept, plan)
        norm = float(sent.norm())
        norm = norm if math.isfinite(norm) else math.inf
        applied = not policy.skips(norm)
        if applied:
            sender.kept = left
            _apply(model, optimizer, sent, norm, kind, step)
        skipped += not applied
        residual = float(sender.kept.norm()) if policy.wants_residuals(step + 1) else None
        duties = policy.observe(Observation(step + 1, applied, norm, before, residual))
        if duties.check_residuals and policy.damaged(step + 1, float(sender.kept.norm().nan_to_num(math.inf))):
            sender.kept = torch.zeros_like(sender.kept)
        before, plan = float(loss.detach()), policy.begin(step + 1)
        losses.append(before)
    late = losses[-kind.steps // 10 :]
    return Outcome([event for event in events if event.kind != "schedule"], skipped, sum(late) / len(late))


class _Sender:
    """`kept`: what is left of former gradients, flat fp32."""

    def __init__(self, numel: int) -> None:
        self.kept = torch.zeros(numel)

    def send(self, flat: Tensor, kept: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """What arrives of `flat`, and what is kept then."""
        if plan.dense:
            return (flat + kept, torch.zeros_like(kept)) if plan.flush else (flat, kept)
        compressor, whole = plan.settings.compressor(), flat + kept
        payload, arrived = (
            torch.empty(compressor.payload_bytes(whole.numel()), dtype=torch.uint8),
            torch.zeros_like(whole),
        )
        compressor.compress(whole, payload, 0)
        compressor.decompress_add(payload, arrived, 1.0)
        return arrived, whole - arrived


def _apply(
    model: nn.Module, optimizer: torch.optim.Optimizer, grad: Tensor, norm: float, kind: Kind, step: int
) -> None:
    factor = min(1.0, kind.clip / norm) if kind.clip and norm else 1.0
    for parameter, part in zip(model.parameters(), _cut(grad * factor, model), strict=True):
        parameter.grad = part
    for group in optimizer.param_groups:
        group["lr"] = kind.lr * min(1.0, (step + 1) / (kind.warmup + 1))
    optimizer.step()


def _cut(flat: Tensor, model: nn.Module) -> Iterator[Tensor]:
    sizes = [parameter.numel() for parameter in model.parameters()]
    parts = zip(flat.split(sizes), model.parameters(), strict=True)
    return (part.view_as(parameter) for part, parameter in parts)
