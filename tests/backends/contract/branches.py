"""The model with two branches as the contract trains it, under DDP or FSDP2."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.attached import Case, Gradients, Run, Section
from tests.support.methods import METHODS as EVERY
from tests.support.methods import WITHOUT_MOMENTUM
from tests.support.two_branches import FOUR_BITS, LOW_RANK, NO_FEEDBACK, STOCHASTIC, loss_of, whole

METHODS: Mapping[str, Section] = {
    **{name: given for name, given in {**EVERY, **WITHOUT_MOMENTUM}.items() if "overrides" not in given},
    "overrides": {
        "bits": 4,
        "block_size": 32,
        "overrides": [{"parameters": "left", "method": "sign"}, {"parameters": "right", "method": "none", "every": 2}],
    },
}
"""Settings of `gradients` for every method, suitable for the model."""
Program = Callable[[Any, int, int], None]
"""Function of model, rank and step that makes the gradients of a step."""
Clear = Callable[[Any, Any, int, int], None]
"""Function of model, optimizer, rank and step that discards the gradients of the step."""


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the whole gradients by parameter, with zeros for parameters without one."""
    every = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    return {n: torch.zeros(p.shape) if p.grad is None else whole(p.grad).clone() for n, p in every.items()}


class BranchesRun(Run):
    """A run of the model of `case`. With `still`, weights stay."""

    def __init__(self, case: "Branching", rank: int, section: Section | None, still: bool) -> None:
        self._case, self._rank, self._step = case, rank, 0
        self._scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100) if case.scaled else None
        setting = replace(case.setting, section=section, lr=0.0 if still else case.setting.lr)
        self.model, self.optimizer, self.attached = setting.build(self._scaler)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=self._case.to_none)

    def backward(self, step: int, factor: float = 1.0) -> float:
        self._step = step
        if self._case.program is not None:
            self._case.program(self.model, self._rank, step)
            return 0.0
        loss = loss_of(self.model, self._rank, step) * factor
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss.item()

    def update(self) -> bool:
        finite = all(bool(values.isfinite().all()) for values in gradients(self.model).values())
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            # Some programs clear gradients before they update.
            self.optimizer.zero_grad()
            self._scaler.update()
        elif finite:
            self.optimizer.step()
        elif self._case.clears is not None:
            self._case.clears(self.model, self.optimizer, self._rank, self._step)
        return finite

    def gradients(self) -> Gradients:
        return {(name, 0): values.flatten() for name, values in gradients(self.model).items()}

    def weights(self) -> list[Tensor]:
        return [whole(parameter) for parameter in self.model.parameters()]

    def save(self, directory: str) -> dict[str, Tensor]:
        self.attached.save(directory)
        return {key: value.clone() for key, value in self.model.state_dict().items()}

    def load(self, directory: str, kept: dict[str, Tensor], residuals: bool) -> None:
        self.model.load_state_dict(kept)
        if residuals:
            self.load_residuals(directory)


@dataclass(frozen=True)
class Branching(Case):
    """A case under DDP or FSDP2.

    Attributes:
        setting: the model, a `Setting` of the engine.
        program: makes the gradients; None for one backward pass.
        to_none: False to clear gradients in place.
        scaled: use a gradient scaler.
        clears: discards the gradients of steps that the program skips, if there is no scaler.
    """

    setting: Any
    program: Program | None = None
    to_none: bool = True
    scaled: bool = False
    clears: Clear | None = None

    def run(self, rank: int, section: Section | None, still: bool = False) -> BranchesRun:
        return BranchesRun(self, rank, section, still)


def clear_in_place(model: Any, optimizer: Any, rank: int, step: int) -> None:
    model.zero_grad(set_to_none=False)


def skipped(setting: Any, clear: Clear) -> dict[str, Case]:
    """Return a case of each way to skip a step."""
    return {
        "scaled": Branching(setting, scaled=True, scales=(8.0, 8.0, 4.0, 4.0, 4.0)),
        "cleared": Branching(setting, clears=clear),
        "cleared in place": Branching(setting, clears=clear_in_place),
    }


def resumed(setting: Any) -> dict[str, Case]:
    """Return cases with and without residuals, with random numbers and with factors."""
    sections = {"int4": FOUR_BITS, "random": STOCHASTIC, "none": NO_FEEDBACK, "rank": LOW_RANK}
    return {name: Branching(setting, section=given) for name, given in sections.items()}


def trained(setting: Any, methods: Mapping[str, Section] = METHODS) -> dict[str, Case]:
    """Return a case of each method of gradients."""
    sections = {name: {"gradients": {"min_numel": 0, **given}} for name, given in methods.items()}
    return {name: Branching(setting, section=given) for name, given in sections.items()}
