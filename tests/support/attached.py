"""What every adapter must hold, shown with a `Run` of its engine.

A check runs on every rank of a job. It trains a `Case` with and without the package, and returns problems or results.
"""

import contextlib
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_compress import UnsupportedError
from tests.support.messages import refusal
from tests.support.methods import NONE
from tests.support.two_branches import FOUR_BITS, bits_of, residual_sums, same_on_all

Section = Mapping[str, Any]
Gradients = dict[tuple[str, int], Tensor]
"""Gradients that the optimizer of a rank reads, by parameter and first element."""
OTHER_KEYS: Mapping[str, Section] = {
    f"/deepspeed_compress/{key} works only with DeepSpeed": {key: given}
    for key, given in {
        "guard": {},
        "adaptive": {},
        "islands": {"size": 1},
        "ownership": "balanced",
        "parallelism": {"tensor": 1},
    }.items()
}
"""Sections with keys that adapters of other engines refuse, by the message of the refusal."""


class Run(ABC):
    """A training run of a small model under one engine.

    Attributes:
        model: the wrapped model.
        attached: handle of the compression; None if the engine runs alone.
        replicated: True if every rank has all gradients.
    """

    model: Any
    attached: Any
    replicated = True

    @abstractmethod
    def backward(self, step: int, factor: float = 1.0) -> float:
        """Make the gradients of a step, and return its loss, which is multiplied by `factor`."""

    @abstractmethod
    def update(self) -> bool:
        """Step the optimizer, and return False if it skips the step."""

    @abstractmethod
    def gradients(self) -> Gradients: ...

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """Return the whole weights."""

    @abstractmethod
    def save(self, directory: str) -> Any:
        """Save the run between steps, and return what `load` needs besides the files."""

    @abstractmethod
    def load(self, directory: str, kept: Any, residuals: bool) -> None:
        """Continue a saved run in this new one, with its residuals or without."""

    def load_residuals(self, directory: str) -> None:
        self.attached.load(directory)

    def clear(self) -> None:
        self.model.zero_grad()

    def steps(self) -> int:
        """Return the number of steps that compression has counted."""
        count: int = self.attached.steps.count
        return count

    @property
    def session(self) -> Any:
        return self.attached.session

    def step(self, step: int, factor: float = 1.0) -> tuple[float, bool]:
        self.clear()
        loss = self.backward(step, factor)
        return loss, self.update()

    def reduced(self, step: int) -> Gradients:
        """Take a step, and return its gradients."""
        self.clear()
        self.backward(step)
        found = self.gradients()
        self.update()
        return found

    def after(self, steps: Iterable[int]) -> list[list[float]]:
        """Train `steps`, and return the weights."""
        for step in steps:
            self.step(step)
        return [weight.flatten().tolist() for weight in self.weights()]

    def sizes(self) -> dict[str, int]:
        """Return the number of elements of each parameter."""
        named = self.model.named_parameters()
        return {name.removeprefix("module."): getattr(one, "ds_numel", one.numel()) for name, one in named}

    def agrees(self) -> bool:
        """Return True if all ranks have the same finite weights."""
        return all(same_on_all(weight) and bool(weight.isfinite().all()) for weight in self.weights())


@dataclass(frozen=True)
class Case(ABC):
    """A program under an engine.

    Attributes:
        ranks: number of ranks.
        section: the section of the run.
        shares: number of ranks that keep halves, thirds, ... of the same residual, and the factor from a residual of a
            mean to that of the gradient.
        scales: loss scale after each step of `traces`.
    """

    ranks: int = field(default=2, kw_only=True)
    section: Section = field(default_factory=lambda: FOUR_BITS, kw_only=True)
    shares: tuple[float, float] = field(default=(1.0, 1.0), kw_only=True)
    scales: tuple[float, ...] = field(default=(1.0,) * 5, kw_only=True)

    @abstractmethod
    def run(self, rank: int, section: Section | None, still: bool = False) -> Run:
        """Return a run with `section`, or with the engine alone if None. If `still`, weights stay as they are."""


def on(ranks: int, cases: Mapping[str, Case], *names: str) -> dict[str, Case]:
    """Return the named cases, or all, on `ranks` ranks."""
    return {f"{name} {ranks}": replace(cases[name], ranks=ranks) for name in names or cases}


def differences(rank: int, case: Case) -> list[str]:
    """Return what differs in 20 steps with method "none" from those of the engine alone."""
    histories = []
    for given in (None, NONE):
        run, steps = case.run(rank, given), list[Any]()
        for step in range(20):
            run.clear()
            loss, gradients = run.backward(step), run.gradients()
            steps.append((loss, {key: value.tolist() for key, value in gradients.items()}, run.update()))
        unset = [parameter.grad is None for parameter in run.model.parameters()]
        histories.append({"steps": steps, "weights": run.after(()), "unset": unset, "applied": steps[-1][2]})
    wrong = [name for name in histories[0] if histories[0][name] != histories[1][name]]
    return wrong if histories[0]["applied"] else [*wrong, "no step"]


def unconserved(rank: int, case: Case) -> list[str]:
    """Return the parameters whose summed gradients differ from the true ones minus the residuals."""
    alone, ours = (case.run(rank, given, still=True) for given in (None, FOUR_BITS))
    true, seen = ([run.reduced(step) for step in range(7)] for run in (alone, ours))
    sizes, (copies, later) = ours.sizes(), case.shares
    kept, means = residual_sums(ours, sizes), residual_sums(ours, sizes, ("means",))
    left = {name: (kept[name] - means[name]) * copies / case.ranks + means[name] * later for name in sizes}
    for total in left.values():
        dist.all_reduce(total)
    wrong = []
    for name, begin in true[0]:
        lost = sum(step[name, begin] for step in true) - sum(step[name, begin] for step in seen)
        expected = left[name][begin : begin + lost.numel()]
        same = not ours.replicated or all(same_on_all(step[name, begin]) for step in seen)
        wrong += [name] if not torch.allclose(lost, expected, atol=2e-6) or not same else []
    compressed = any((one[key] != other[key]).any() for one, other in zip(true, seen, strict=True) for key in one)
    return wrong if compressed else [*wrong, "nothing was compressed"]


def held_by(run: Any) -> dict[Any, list[float]]:
    """Return the residuals of this rank, by store and range."""
    stores = run.session.residuals.by_name.items()
    return {(name, *place): values.tolist() for name, store in stores for place, values in store.items()}


def traces(rank: int, case: Case) -> list[str]:
    """Return the traces of a step with a NaN on rank 1, which is skipped on all ranks. Powers of two are exact."""
    run, applied, scales, wrong = case.run(rank, case.section), list[bool](), [], []
    for step in range(len(case.scales)):
        before, bits = held_by(run), bits_of(run)
        applied.append(run.step(step, math.nan if (step, rank) == (2, 1) else 1.0)[1])
        scales.append(run.session.clock.loss_scale)
        if step == 2:
            factor = scales[2] / scales[1]
            same = held_by(run) == {place: [factor * value for value in kept] for place, kept in before.items()}
            wrong += [] if before and same and (factor != 1 or bits == bits_of(run)) else ["residuals"]
    found = {"steps": applied == [step != 2 for step in range(len(applied))], "weights": run.agrees()}
    found |= {f"scales: {scales}": tuple(scales) == case.scales, "count": run.steps() == len(case.scales)}
    return wrong + [name for name, right in found.items() if not right]


def unlike_uninterrupted(rank: int, case: Case, directory: str) -> list[str]:
    """Return a problem if a resumed run has other bits than one that continues, or one without residuals has not."""
    run = case.run(rank, case.section)
    run.after(range(3))
    kept = run.save(directory)
    end, others = run.after(range(3, 6)), []
    for residuals in (True, False):
        run = case.run(rank, case.section)
        run.load(directory, kept, residuals)
        assert not residuals or run.steps() == 3
        others.append(run.after(range(3, 6)))
    return [] if [one == end for one in others] == [True, False] else [str([one == end for one in others])]


def residuals_by_parameter(rank: int, case: Case, directory: str, saves: bool) -> dict[str, float]:
    """Return the sums of this rank's residuals of gradients, after some steps or after loading."""
    run = case.run(rank, case.section)
    if saves:
        run.after(range(3, 6))
        run.save(directory)
    else:
        run.load_residuals(directory)
    stores = residual_sums(run, run.sizes(), ("gradients",))
    return {name: values.double().sum().item() for name, values in stores.items()}


def unlearned(rank: int, case: Case) -> str:
    """Train 40 steps. Return a problem if ranks differ or the loss does not decrease."""
    run = case.run(rank, case.section)
    losses = [run.step(step % 4)[0] for step in range(40)]
    if not run.agrees():
        return "ranks differ"
    return "" if sum(losses[-4:]) < 0.8 * sum(losses[:4]) else f"{losses[:4]} -> {losses[-4:]}"


def announced(rank: int, case: Case) -> tuple[str, list[Any]]:
    """Return the text on standard error after attaching, and the figures of a step."""
    written, figures = io.StringIO(), list[Any]()
    with contextlib.redirect_stderr(written):
        run = case.run(rank, case.section)
    run.session.subscribe(figures.append)
    run.step(0)
    return written.getvalue(), figures


def refusals(rank: int, case: Case) -> list[str]:
    """Return the messages of the refusals of `OTHER_KEYS`."""
    return [refusal(UnsupportedError, partial(case.run, rank, given)) for given in OTHER_KEYS.values()]
