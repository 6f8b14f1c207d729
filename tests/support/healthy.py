"""Healthy training of many kinds in one process, with compressed gradients and a guard.

The guard observes realistic figures: norms that fall by decades in a warm-up, batches of one example, losses that go to
zero or change with the data, and steps without any gradient. All gradients are compressed with error feedback, whereas
the ranks of a real run keep their own part exact.
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
from deepspeed_compress.policy.decider import Observation
from deepspeed_compress.policy.policy import Policy

Task = Callable[[torch.Generator], tuple[nn.Module, Callable[[nn.Module, int], Tensor]]]
"""Function of a random generator that returns a model, and a function of model and step that returns the loss."""
Fault = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function of step, gradient and residual that returns a disturbed gradient and residual."""


@dataclass(frozen=True)
class Kind:
    """A kind of training run.

    Attributes:
        task: model and loss.
        lr: learning rate.
        seed: seed of the run.
        warmup: steps in which the learning rate rises.
        dense: uncompressed steps at the beginning.
        clip: maximum gradient norm; 0 for no clipping.
        gradients: key of `METHODS`.
        steps: number of steps.
    """

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
    """Outcome of a run.

    Attributes:
        events: events of the guard.
        skipped: number of optimizer steps that the guard skipped.
        loss: mean loss of the last tenth of the run.
    """

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
    """Return the training of a GPT on a random grammar, which differs between `topics` parts of the data."""

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
    """Return a regression on targets with outliers."""

    def task(generator: torch.Generator) -> tuple[nn.Module, Callable[[nn.Module, int], Tensor]]:
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

        def loss(model: nn.Module, step: int) -> Tensor:
            x = torch.randn(batch, 16, generator=generator)
            noise = torch.randn(batch, generator=generator) / torch.rand(batch, generator=generator).clamp_min(0.02)
            return functional.smooth_l1_loss(model(x).squeeze(1), x[:, :4].sum(dim=1) + noise)

        return model, loss

    return task


def memorized(examples: int, batch: int) -> Task:
    """Return a classification of a few examples, which are repeated until the loss is nearly zero."""

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
    """Return a policy gradient with rewards relative to their mean. If all rewards are equal, there is no gradient."""

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
    """Return the training of a recurrent network, whose gradients sometimes explode."""

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
    "memorized": Kind(memorized(60, 4), 3e-3, 17, steps=400),
    "memorized, one at a time": Kind(memorized(40, 1), 3e-3, 18, steps=400),
    "rewards": Kind(rewards(8), 3e-3, 19, steps=400),
    "rewards, small groups": Kind(rewards(3), 1e-2, 20, steps=400),
    "recurrent": Kind(recurrent(8, 20), 3e-3, 21, warmup=50),
    "recurrent, high rate": Kind(recurrent(4, 30), 1e-2, 22, warmup=100),
    "recurrent, signs": Kind(recurrent(8, 20), 3e-3, 23, gradients="signs"),
}
CHANGING = Kind(language(32, 2, 8, topics=4), 3e-3, 13, warmup=20)
"""A run whose data change three times."""
METHODS: dict[str, dict[str, Any]] = {
    "4 bits": {"bits": 4},
    "2 bits": {"bits": 2},
    "signs": {"method": "sign"},
    "top-k": {"method": "topk", "density": 0.05},
}


def train(
    kind: Kind, settings: dict[str, Any], fault: Fault = lambda step, grad, residual: (grad, residual)
) -> Outcome:
    """Train under a guard with `settings`."""
    torch.manual_seed(kind.seed)
    generator = torch.Generator().manual_seed(kind.seed)
    model, loss_of = kind.task(generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=kind.lr, betas=(0.9, 0.95))
    section: dict[str, Any] = {"gradients": METHODS[kind.gradients], "schedule": {"warmup_steps": kind.dense}}
    events: list[Event] = []
    policy = Policy(parse_section({SECTION: {**section, "guard": settings}}), None, events.append)
    guard = policy.guard
    assert guard is not None
    sender, losses, skipped, before = _Sender(sum(p.numel() for p in model.parameters())), [], 0, None
    plan = policy.begin(0)
    for step in range(kind.steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        grad = nn.utils.parameters_to_vector(p.grad for p in model.parameters())
        sent, residual = sender.send(*fault(step, grad, sender.residual), plan)
        norm = float(sent.norm())
        norm = norm if math.isfinite(norm) else math.inf
        applied = not guard.skips(norm)
        if applied:
            sender.residual = residual
            _apply(model, optimizer, sent, norm, kind, step)
        skipped += not applied
        residual_norm = float(sender.residual.norm()) if guard.wants_residuals(step + 1, plan) else None
        actions = policy.observe(Observation(step + 1, applied, norm, before, residual_norm))
        largest = float(sender.residual.norm().nan_to_num(math.inf))
        if actions.check_residuals and guard.damaged(step + 1, plan, largest):
            sender.residual = torch.zeros_like(sender.residual)
        before, plan = float(loss.detach()), policy.begin(step + 1)
        losses.append(before)
    late = losses[-kind.steps // 10 :]
    return Outcome([event for event in events if event.kind != "schedule"], skipped, sum(late) / len(late))


class _Sender:
    """Sender with a `residual` (flat fp32)."""

    def __init__(self, numel: int) -> None:
        self.residual = torch.zeros(numel)

    def send(self, flat: Tensor, residual: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
        """Return the decoded message of `flat`, and the new residual."""
        if plan.dense:
            return (flat + residual, torch.zeros_like(residual)) if plan.flush else (flat, residual)
        compressor, total = plan.settings.compressor(), flat + residual
        payload = torch.empty(compressor.payload_bytes(total.numel()), dtype=torch.uint8)
        decoded = torch.zeros_like(total)
        compressor.compress(total, payload, 0)
        compressor.decompress_add(payload, decoded, 1.0)
        return decoded, total - decoded


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
