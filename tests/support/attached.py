"""What ranks do with models that are attached under DDP or FSDP2, given a `Setting` of either."""

import contextlib
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from tests.support.methods import METHODS, WITHOUT_MOMENTUM
from tests.support.seeds import SEEDS
from tests.support.two_branches import (
    FOUR_BITS,
    NONE,
    bits_of,
    loss_of,
    loss_on_text,
    refusal,
    residual_sums,
    same_on_all,
    section,
    start,
    take_steps,
    training_problem,
    whole,
)

__all__ = [
    "METHODS_OF_BRANCHES",
    "WORKS_ONLY_WITH_DEEPSPEED",
    "Clear",
    "Program",
    "announced",
    "check_overflow",
    "gpts",
    "gradients",
    "late_refusals",
    "norms_of",
    "overflow",
    "remembered_by",
    "resume",
    "same_as_uncompressed",
    "train_methods",
    "train_together",
    "unconserved",
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
WORKS_ONLY_WITH_DEEPSPEED: Mapping[str, Mapping[str, Any]] = {
    f"/deepspeed_compress/{key} works only with DeepSpeed": {key: given}
    for key, given in {
        "guard": {},
        "adaptive": {},
        "islands": {"size": 1},
        "ownership": "balanced",
        "parallelism": {"tensor": 1},
    }.items()
}
"""Sections with keys that other adapters refuse, by the message of the refusal."""
Clear = Callable[[Any, Any, int, int], None]
"""Function of model, optimizer, rank and step that discards the gradients of the step."""


Program = Callable[[Any, int, int], None]
"""Function of model, rank and step that makes the gradients of a step."""


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the whole gradients by parameter, with zeros for parameters without one."""
    every = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    return {n: torch.zeros(p.shape) if p.grad is None else whole(p.grad).clone() for n, p in every.items()}


def run_program(
    program: Program, setting: Any, rank: int, steps: int, to_none: bool = True
) -> tuple[list[dict[str, Tensor]], Any, Any]:
    """Return the gradients of every step, the model, and the handle of its compression."""
    model, optimizer, attached = setting.build()
    seen = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        program(model, rank, step)
        seen.append(gradients(model))
        optimizer.step()
    return seen, model, attached


def same_as_uncompressed(program: Program, setting: Any, rank: int) -> bool:
    """Return True if 20 steps with method "none" have the gradients and weights of steps without the package."""
    (alone, model, _), (ours, attached, _) = (
        run_program(program, replace(setting, section=given), rank, 20) for given in (None, NONE)
    )
    pairs = list(zip(model.parameters(), attached.parameters(), strict=True))
    return all(torch.equal(whole(a), whole(b)) and (a.grad is None) == (b.grad is None) for a, b in pairs) and all(
        torch.equal(one[key], other[key]) for one, other in zip(alone, ours, strict=True) for key in one
    )


def unconserved(
    program: Program, setting: Any, rank: int, share: float, later: float = 1.0, to_none: bool = True
) -> list[str]:
    """Return the parameters whose summed gradients differ from the true ones minus the residuals.

    Args:
        program: the program, which has seven steps.
        setting: the model. Its weights stay, so that all runs see the same gradients.
        rank: this rank.
        share: factor from a residual to its part of the mean.
        later: factor from a residual of a mean to that of the gradient.
        to_none: False to clear gradients in place.
    """
    true, _, _ = run_program(program, replace(setting, lr=0.0), rank, 7, to_none)
    seen, model, attached = run_program(program, replace(setting, lr=0.0, section=FOUR_BITS), rank, 7, to_none)
    sizes = {name.removeprefix("module."): parameter.numel() for name, parameter in model.named_parameters()}
    kept, means = residual_sums(attached, sizes), residual_sums(attached, sizes, ("means",))
    wrong = []
    for key in sizes:
        total = (kept[key] - means[key]) * share + means[key] * later
        dist.all_reduce(total)
        left = sum(step[key] for step in true) - sum(step[key] for step in seen)
        if not torch.allclose(left.flatten(), total, atol=2e-6) or not all(same_on_all(step[key]) for step in seen):
            wrong.append(key)
    if not any((one[key] != other[key]).any() for one, other in zip(true, seen, strict=True) for key in sizes):
        wrong.append("nothing was compressed")
    return wrong


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
        finite = all(bool(whole(parameter.grad).isfinite().all()) for parameter in model.parameters())
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
    weights = [whole(parameter) for parameter in model.parameters()]
    found["equal"] = all(same_on_all(weight) and bool(weight.isfinite().all()) for weight in weights)
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


def train_together(rank: int, all_four: Any, first: Any, of_pair: Any, second: Any) -> tuple[bool, bool]:
    """Train a model of all four ranks and one of each pair of ranks at once, with an optimizer for each of them.

    Return whether all ranks have the same weights of the former, and only the ranks of a pair those of the latter.
    """
    for step in range(4):
        first.zero_grad()
        second.zero_grad()
        (loss_of(all_four, rank, step) + loss_of(of_pair, rank, step)).backward()
        first.step()
        second.step()
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, [whole(parameter).flatten().tolist() for parameter in of_pair.parameters()])
    apart = gathered[0] == gathered[1] and gathered[2] == gathered[3] and gathered[0] != gathered[2]
    return all(same_on_all(whole(parameter)) for parameter in all_four.parameters()), apart


def announced(rank: int, setting: Any) -> tuple[str, list[Any]]:
    """Return the text on standard error after attaching, and the figures of a step."""
    start()
    written, figures = io.StringIO(), []
    with contextlib.redirect_stderr(written):
        model, optimizer, attached = setting.build()
    attached.session.subscribe(figures.append)
    take_steps(model, optimizer, rank, range(1))
    return written.getvalue(), figures


Gpt = tuple[float, list[Any], int]
"""The loss, the figures of every step, and the number of elements of a model."""


def gpts(
    rank: int, wrap: Callable[[Any], Any], attach: Callable[..., Any], given: Mapping[str, Any], directory: Path
) -> list[Gpt]:
    """Train a small GPT-2 on one text for each seed, after wrapping it and attaching a section to it."""
    start()
    return [_gpt(rank, wrap, attach, {**given, "monitor": {"path": f"{directory}/{seed}"}}, seed) for seed in SEEDS]


def _gpt(rank: int, wrap: Callable[[Any], Any], attach: Callable[..., Any], given: Mapping[str, Any], seed: int) -> Gpt:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=128, n_positions=64)
    model = wrap(transformers.GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    figures: list[Any] = []
    attach(model, section(given), optimizer).session.subscribe(figures.append)
    loss = loss_on_text(model, optimizer, seed, rank)
    assert all(same_on_all(whole(parameter)) for parameter in model.parameters())
    return loss, figures, sum(parameter.numel() for parameter in model.parameters())


def late_refusals(rank: int, works: Sequence[Callable[[], object]]) -> list[str]:
    """Return the message of each refusal that is raised late, or "" without one."""
    start()
    return [refusal(work) for work in works]
