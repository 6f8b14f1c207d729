"""Learning rates of islands that join late: equal to those of the others, or a warning or refusal by name."""

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.lr_schedules import WarmupLR
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import deepspeed_compress
from deepspeed_compress.errors import CompressWarning, UnsupportedError
from deepspeed_compress.local_sgd.deepspeed.rates import LearningRates, rates_of
from tests.support.forks import run_forks
from tests.support.island_jobs import section
from tests.support.jobs import Job, network
from tests.support.messages import caught_warnings

Make = Callable[[torch.optim.Optimizer], Any]


def made(make: Make | None, lr: float = 0.1) -> Any:
    """Return a stand-in with the attributes of an engine that schedules read."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=lr)
    return SimpleNamespace(optimizer=optimizer, global_steps=0, lr_scheduler=make and make(optimizer))


def train(engine: Any, rates: LearningRates, steps: int) -> None:
    for _ in range(steps):
        engine.optimizer.step()
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.step()
        engine.global_steps += 1
        rates.update_snapshot()


def late(first: Make | None, second: Make | None, lr: float = 0.1) -> tuple[Any, Any, list[str]]:
    """Return the engines of an island after 7 steps and of one that joins then, and the warnings of the latter."""
    engine, other = made(first), made(second, lr)
    rates, follower = LearningRates(engine), LearningRates(other)
    train(engine, rates, 7)
    with caught_warnings() as texts:
        follower.catch_up(json.loads(json.dumps(rates.published())))
    return engine, other, texts


SCHEDULES: Mapping[str, Make | None] = {
    "none": None,
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=1.0, total_steps=50),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "sequential": lambda optimizer: SequentialLR(optimizer, [StepLR(optimizer, 2), StepLR(optimizer, 3)], [4]),
    "deepspeed": lambda optimizer: WarmupLR(optimizer, warmup_num_steps=20),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_island_that_joins_late_has_the_learning_rates_of_the_others(name: str) -> None:
    make = SCHEDULES[name]
    engine, other, warned = late(make, make)
    assert rates_of(other) == pytest.approx(rates_of(engine))
    assert warned == []
    assert name == "none" or rates_of(engine) != [0.1]


def test_a_metric_schedule_that_cannot_follow_is_refused_by_name() -> None:
    named = "/islands/elastic: this island is 7 steps behind .* ReduceLROnPlateau.step is missing .*; write such"
    with pytest.raises(UnsupportedError, match=named):
        late(SCHEDULES["lambda"], lambda optimizer: ReduceLROnPlateau(optimizer))


@pytest.mark.parametrize(
    ("second", "lr", "text"),
    [
        (lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (2 + step)), 0.1, "learning rates of this island"),
        (lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)), 0.2, "learning rates of this island"),
        (None, 0.1, "learning rates of this island are [0.1], and those of the others [0.0125]"),
    ],
)
def test_a_warning_shows_both_learning_rates_if_they_differ(second: Make | None, lr: float, text: str) -> None:
    _, _, [warned, *_] = late(SCHEDULES["lambda"], second, lr=lr)
    assert text in warned


def test_an_edited_learning_rate_is_reported() -> None:
    engine, other = made(None), made(None)
    rates = LearningRates(engine)
    engine.optimizer.param_groups[0]["lr"] = 0.7
    rates.update_snapshot()
    with pytest.warns(CompressWarning, match=r"are \[0.1\], and those of the others \[0.7\]"):
        LearningRates(other).catch_up(rates.published())


def of_one_job(rank: int, job: Job) -> list[str]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + rank))
    with caught_warnings() as texts:
        config = {key: value for key, value in job.config().items() if key != "optimizer"}
        deepspeed_compress.initialize(model=model, optimizer=optimizer, config=config)
    return [text for text in texts if "learning rates" in text]


def test_islands_of_one_job_with_different_rates_are_reported() -> None:
    first, second = run_forks(2, of_one_job, Job(0, section(size=1)))
    assert first == []
    assert "are [0.02], and those of the first island [0.01]" in second[0]
