"""The schedule of the section: warm-up, ramp and phases. Its settings depend on the step alone."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from deepspeed_compress.config import CompressConfig, GradientsConfig, WeightsConfig, patched
from deepspeed_compress.config.schedules import Phase, Ramp, patched_weights, phase_ends
from deepspeed_compress.config.sparse_methods import SparseConfig
from deepspeed_compress.policy.decider import Decider, StepPlan

RAMP_STAGES = 16
"""Number of stages in which a ramp lowers the density. Every density has its own message sizes."""

_SHAPES: Mapping[str, Callable[[float, float, float], float]] = {
    "linear": lambda start, end, p: start + (end - start) * p,
    "exponential": lambda start, end, p: start * (end / start) ** p,
    "cosine": lambda start, end, p: end + (start - end) * (1 + math.cos(math.pi * p)) / 2,
}
"""Interpolations from `start` (p = 0) to `end` (p = 1)."""


@dataclass(frozen=True)
class SettingsSchedule(Decider):
    """The schedule of `config`. `total` is the number of optimizer steps of training; only phases need it."""

    config: CompressConfig
    total: int | None = None

    def plan(self, step: int, plan: StepPlan) -> StepPlan:
        return replace(plan, settings=self.at(step), weights=self.weights_at(step))

    def at(self, step: int) -> GradientsConfig:
        """Return the settings of `gradients` in optimizer step `step` (0-based); method "none" during the warm-up."""
        schedule = self.config.schedule
        if step < schedule.warmup_steps:
            return patched(self.config.gradients, {"method": "none"})
        phase = self._phase(step)
        chosen = self.config.gradients if phase is None else patched(self.config.gradients, phase.gradients)
        ramp, since = schedule.ramp, step - schedule.warmup_steps
        return chosen if ramp is None or since >= ramp.steps else _ramped(chosen, ramp, since)

    def weights_at(self, step: int) -> WeightsConfig:
        """Return the settings of `weights` in optimizer step `step`; they have no effect during the warm-up."""
        phase = self._phase(step)
        patch = {} if phase is None else phase.weights
        return patched_weights(self.config.weights, patch) if patch else self.config.weights

    def _phase(self, step: int) -> Phase | None:
        phases = self.config.schedule.phases
        if not phases:
            return None
        assert self.total is not None, "phases need the number of steps of training"
        ends = (math.ceil((end or 1.0) * self.total) for end in phase_ends(self.config.schedule))
        # Training may continue beyond the announced total.
        return next((phase for phase, end in zip(phases, ends, strict=True) if step < end), phases[-1])

    @property
    def changes(self) -> tuple[int, ...]:
        """Return the steps at which the settings may change, in ascending order; the first is 0."""
        schedule = self.config.schedule
        found = {0, schedule.warmup_steps}
        if schedule.ramp is not None:
            stages = len(schedule.ramp.stages or ()) or RAMP_STAGES
            steps = (math.ceil(schedule.ramp.steps * stage / stages) for stage in range(stages + 1))
            found |= {schedule.warmup_steps + step for step in steps}
        if schedule.phases and self.total is not None:
            found |= {math.ceil((end or 1.0) * self.total) for end in phase_ends(schedule)[:-1]}
        return tuple(sorted(found))


def _ramped(chosen: GradientsConfig, ramp: Ramp, since: int) -> GradientsConfig:
    """Return `chosen` as it is `since` steps after the start of the ramp."""
    if ramp.stages is not None:
        return patched(chosen, ramp.stages[since * len(ramp.stages) // ramp.steps])
    if not isinstance(chosen, SparseConfig) or chosen.density >= ramp.start:
        return chosen
    progress = since * RAMP_STAGES // ramp.steps / RAMP_STAGES
    return patched(chosen, {"density": _SHAPES[ramp.shape](ramp.start, chosen.density, progress)})


def timeline(scheduled: SettingsSchedule) -> list[tuple[int, GradientsConfig, WeightsConfig]]:
    """Return (first step, settings of gradients, settings of weights) for every interval of constant settings."""
    found: list[tuple[int, GradientsConfig, WeightsConfig]] = []
    for step in scheduled.changes:
        settings = (scheduled.at(step), scheduled.weights_at(step))
        if not found or found[-1][1:] != settings:
            found.append((step, *settings))
    return found
