"""Faults in gradients and weights that a guard must find."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.support.jobs import Job, data, start

FAULT = 30
"""Step in which the fault begins."""


GUARD = {"cooldown_steps": 4, "residual_every": 5, "window": 16}


@dataclass(frozen=True)
class Story:
    """Course of training on one rank. `final` is the loss on data that was not trained on."""

    losses: list[float]
    events: list[str]
    settings: list[str]
    skipped: int
    final: float


Disturb = Callable[[Any, int, int], float]
"""Function from the engine, the rank and the step to a factor of the loss. It may change the engine."""


def live(rank: int, job: Job, disturb: Disturb) -> Story:
    return live_on(data(rank, job), rank, job, disturb)


def live_on(batches: Sequence[tuple[torch.Tensor, torch.Tensor]], rank: int, job: Job, disturb: Disturb) -> Story:
    engine, losses, settings = start(job), [], []
    for step, (x, y) in enumerate(batches):
        factor = disturb(engine, rank, step)
        settings.append(engine.compression.settings)
        losses += train_one(engine, x, y, factor)
    x = torch.randn(256, 12, generator=torch.Generator().manual_seed(7))
    engine.eval()
    with torch.no_grad():
        output = engine(x.to(next(engine.module.parameters()).dtype)).float()
    final = float((output - x[:, :3].sum(dim=1, keepdim=True)).square().mean())
    events = [f"{event.step} {event.kind} {event.before} -> {event.after}" for event in engine.compression.events]
    engine.destroy()
    return Story(losses, events, settings, engine.skipped_steps, final)


def train_one(engine: Any, x: torch.Tensor, y: torch.Tensor, factor: float) -> list[float]:
    output = engine(x.to(next(engine.module.parameters()).dtype))
    loss = (output.float() - y).square().mean()
    engine.backward(loss * factor)
    engine.step()
    return [float(loss.detach())]


def not_a_number(engine: Any, rank: int, step: int) -> float:
    return math.nan if (rank, step) == (1, FAULT) else 1.0


def exploding(engine: Any, rank: int, step: int) -> float:
    return 1e6 if rank == 1 and FAULT <= step < FAULT + 3 else 1.0


def poison(engine: Any, rank: int, step: int, value: float = 1e8) -> float:
    """Damage the residuals of rank 1, so everything that it sends is wrong from now on."""
    if (rank, step) == (1, FAULT):
        for _, payload in engine.compression.residuals.by_name["gradients"].payloads():
            payload.view(torch.bfloat16)[:] = value
    return 1.0
