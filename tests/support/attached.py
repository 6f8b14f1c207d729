"""What ranks do with models that are attached under DDP or FSDP2, given a `Setting` of either."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.support.methods import METHODS, WITHOUT_MOMENTUM
from tests.support.two_branches import (
    bits_of,
    loss_of,
    refusal,
    same_on_all,
    start,
    take_steps,
    training_problem,
    whole,
)

__all__ = [
    "METHODS_OF_BRANCHES",
    "Clear",
    "check_overflow",
    "late_refusals",
    "norms_of",
    "overflow",
    "remembered_by",
    "resume",
    "train_methods",
]

METHODS_OF_BRANCHES: Mapping[str, Mapping[str, Any]] = {
    **{name: given for name, given in {**METHODS, **WITHOUT_MOMENTUM}.items() if "overrides" not in given},
    "overrides": {
        "bits": 4,
        "block_size": 32,
        "overrides": [{"parameters": "left", "method": "sign"}, {"parameters": "right", "method": "none", "every": 2}],
    },
}
"""Settings of `gradients` for every method, suitable for the model with two branches."""
Clear = Callable[[Any, Any, int, int], None]
"""Function of model, optimizer, rank and step that discards the gradients of the step."""


def overflow(rank: int, setting: Any, scaled: bool, clear: Clear) -> dict[str, Any]:
    """Return the effects of a step with a NaN on rank 1, also in a program that skips such steps itself."""
    start()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100) if scaled else None
    model, optimizer, attached = setting.build(scaler)
    found: dict[str, Any] = {"finite": [], "scales": [], "same": []}
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step) * (math.nan if (step, rank) == (2, 1) else 1.0)
        before, norms = bits_of(attached), norms_of(attached)
        (loss if scaler is None else scaler.scale(loss)).backward()
        finite = all(bool(whole(one.grad).isfinite().all()) for one in model.parameters())
        if scaler is not None:
            scaler.step(optimizer)
            # Some programs clear gradients before they update.
            optimizer.zero_grad()
            scaler.update()
            found["scales"].append(attached.session.clock.loss_scale)
        elif finite:
            optimizer.step()
        else:
            clear(model, optimizer, rank, step)
        found["finite"].append(finite)
        if not finite:
            factor, after = 4.0 if scaled else 1.0, norms_of(attached)
            found["same"] = [math.isclose(norms[name], factor * after[name], rel_tol=1e-6) for name in norms]
            found["bits"] = scaled or before == bits_of(attached)
    found["steps"] = attached.steps.count
    weights = [whole(one) for one in model.parameters()]
    found["equal"] = all(same_on_all(one) and bool(one.isfinite().all()) for one in weights)
    return found


def norms_of(attached: Any) -> dict[str, float]:
    """Return the sum of the squared norms of each residual store."""
    return {name: sum(map(float, store.square_norms())) for name, store in attached.session.stores.items()}


def check_overflow(found: Mapping[str, Any], scaled: bool) -> None:
    """Check that the step was skipped on this rank, and has left no trace."""
    assert found["finite"] == [True, True, False, True, True]
    assert found["scales"] == ([8.0, 8.0, 4.0, 4.0, 4.0] if scaled else [])
    assert found["same"]
    assert all(found["same"])
    assert found["bits"]
    assert found["equal"]
    assert found["steps"] == 5


def resume(rank: int, setting: Any, directory: str) -> tuple[bool, bool]:
    """Return whether a resumed run has the bits of one that continues, and whether one without residuals differs."""
    start()
    model, optimizer, attached = setting.build()
    take_steps(model, optimizer, rank, range(3))
    attached.save(directory)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    ends = [take_steps(model, optimizer, rank, range(3, 6))]
    for loads in (True, False):
        model, optimizer, attached = setting.build()
        model.load_state_dict(saved)
        if loads:
            attached.load(directory)
            assert attached.steps.count == 3
        ends.append(take_steps(model, optimizer, rank, range(3, 6)))
    return ends[0] == ends[1], ends[0] != ends[2]


def remembered_by(rank: int, setting: Any, directory: str, saves: bool) -> dict[str, float]:
    """Return the sums of this rank's residuals of gradients by parameter, after some steps or after loading."""
    start()
    model, optimizer, attached = setting.build()
    if saves:
        take_steps(model, optimizer, rank, range(3, 6))
        attached.save(directory)
    else:
        attached.load(directory)
    found = dict.fromkeys((name.removeprefix("module.") for name, _ in model.named_parameters()), 0.0)
    for (name, _, _), values in attached.session.stores["gradients"].items():
        found[name] += values.double().sum().item()
    return found


def train_methods(rank: int, setting: Any, methods: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the methods with which ranks differ or the loss does not decrease."""
    start()
    problems = {}
    for name, given in methods.items():
        model, optimizer, _ = replace(setting, section={"gradients": {"min_numel": 0, **given}}).build()
        problems[name] = training_problem(model, optimizer, rank)
    return [f"{name}: {problem}" for name, problem in problems.items() if problem]


def late_refusals(rank: int, works: Sequence[Callable[[], object]]) -> list[str]:
    """Return the message of each refusal that is raised late, or "" without one."""
    start()
    return [refusal(work) for work in works]
