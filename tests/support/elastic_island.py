"""An island of one rank as a process that may be killed at any time; see `tests/support/elastic_job.py`.

It learns a function from noisy values, which depend on its number and the step. It logs a line per exchange.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

import deepspeed_compress
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import IslandError
from tests.support.coordinators import become_island

WIDTH = 24
BATCH = 16


@dataclass(frozen=True)
class Plan:
    """Settings of an island.

    Attributes:
        log: path of its log.
        port: port of its job.
        pause: additional seconds per step.
        versions: version of the anchor at which it ends.
        planned: version of the anchor at which its learning rate schedule ends.
        section: its configuration.
    """

    log: str
    port: int
    pause: float
    versions: int
    planned: int
    section: Mapping[str, Any]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))


def batch(seed: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, WIDTH, generator=generator)
    y = torch.stack([(0.3 * x[:, k::4].sum(dim=1)).tanh() for k in range(4)], dim=1)
    return x, y + 0.5 * torch.randn(y.shape, generator=generator)


def loss_of(weights: Mapping[str, list[float]]) -> float:
    """Return the loss on 4096 samples that no island has seen."""
    model = network()
    model.load_state_dict(
        {name: torch.tensor(weights[name]).view_as(kept) for name, kept in model.state_dict().items()}
    )
    x, y = batch(10**9, 4096)
    with torch.no_grad():
        return float((model(x) - y).square().mean())


def live(rank: int, plan: Plan) -> None:
    """Train until the anchor has the planned version."""
    become_island(0, 1, [plan.port])
    model = network()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "steps_per_print": 10**6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        # An island that joins later continues at the step of the others.
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                "total_num_steps": plan.planned * plan.section["islands"]["sync_every"],
                "warmup_num_steps": 10,
            },
        },
        "zero_optimization": {"stage": 1},
        SECTION: dict(plan.section),
    }
    engine = deepspeed_compress.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    islands = engine.compression.islands
    with Path(plan.log).open("a", buffering=1) as log:
        log.write(json.dumps({"kind": "joined", "number": islands.number}) + "\n")
        try:
            train(engine, plan, log)
            weights = {
                name: parameter.detach().flatten().tolist() for name, parameter in engine.module.named_parameters()
            }
            log.write(json.dumps({"kind": "end", "number": islands.number, "weights": weights}) + "\n")
        except IslandError as error:
            log.write(json.dumps({"kind": "error", "number": islands.number, "text": str(error)}) + "\n")
    engine.destroy()
    os._exit(0)


def train(engine: Any, plan: Plan, log: TextIO) -> None:
    """Train, and write a line for every exchange."""
    islands, done = engine.compression.islands, 0
    while islands.exchange.version < plan.versions:
        x, y = batch(1_000_000 * islands.number + engine.global_steps)
        time.sleep(plan.pause)
        engine.backward((engine(x) - y).square().mean())
        engine.step()
        for result in list(islands.history)[done:]:
            where = {"number": islands.number, "version": islands.exchange.version, "step": engine.global_steps}
            log.write(json.dumps({**asdict(result), **where}) + "\n")
        done = len(islands.history)
