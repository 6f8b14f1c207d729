"""The settings of every step, as the section writes them: warm-up, ramp, phases. They depend on the step alone."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from deepspeed_compress.config import CompressConfig, GradientsConfig, Ramp, SparseConfig, patched, phase_ends

__all__ = ["Scheduled", "timeline"]

PIECES = 16
"""In which the density of a ramp falls: every density has message sizes of its own."""

_SHAPES: Mapping[str, Callable[[float, float, float], float]] = MappingProxyType(
    {
        "linear": lambda start, end, p: start + (end - start) * p,
        "exponential": lambda start, end, p: start * (end / start) ** p,
        "cosine": lambda start, end, p: end + (start - end) * (1 + math.cos(math.pi * p)) / 2,
    }
)
"""From `start` (p = 0) to `end` (p = 1)."""


@dataclass(frozen=True)
class Scheduled:
    """`total` is the number of optimizer steps of training, needed for phases alone."""

    config: CompressConfig
    total: int | None = None

    def at(self, step: int) -> GradientsConfig:
        """Settings of `gradients` in optimizer step `step` (0-based); method "none" during the warm-up."""
        schedule = self.config.schedule
        if step < schedule.warmup_steps:
            return patched(self.config.gradients, {"method": "none"})
        chosen = patched(self.config.gradients, self._phase(step))
        ramp, since = schedule.ramp, step - schedule.warmup_steps
        return chosen if ramp is None or since >= ramp.steps else _ramped(chosen, ramp, since)

    def _phase(self, step: int) -> Mapping[str, Any]:
        phases = self.config.schedule.phases
        if not phases:
            return {}
        assert self.total is not None, "phases are refused where the length of training is not known"
        ends = (math.ceil((end or 1.0) * self.total) for end in phase_ends(self.config.schedule))
        # Training may go on for longer than it was said to.
        found = next((phase for phase, end in zip(phases, ends, strict=True) if step < end), phases[-1])
        return found.gradients

    @property
    def changes(self) -> tuple[int, ...]:
        """Steps at which the settings may change, in order; the first is 0."""
        schedule = self.config.schedule
        found = {0, schedule.warmup_steps}
        if schedule.ramp is not None:
            pieces = len(schedule.ramp.stages or ()) or PIECES
            steps = (math.ceil(schedule.ramp.steps * piece / pieces) for piece in range(pieces + 1))
            found |= {schedule.warmup_steps + step for step in steps}
        if schedule.phases and self.total is not None:
            found |= {math.ceil((end or 1.0) * self.total) for end in phase_ends(schedule)[:-1]}
        return tuple(sorted(found))


def _ramped(chosen: GradientsConfig, ramp: Ramp, since: int) -> GradientsConfig:
    """`chosen` as it is `since` steps after the ramp began."""
    if ramp.stages is not None:
        return patched(chosen, ramp.stages[since * len(ramp.stages) // ramp.steps])
    if not isinstance(chosen, SparseConfig) or chosen.density >= ramp.start:
        return chosen
    density = chosen.density
    return patched(chosen, {"density": _SHAPES[ramp.shape](ramp.start, density, since * PIECES // ramp.steps / PIECES)})


def timeline(scheduled: Scheduled) -> list[tuple[int, GradientsConfig]]:
    """(first step, settings) of every stretch with settings of its own."""
    found: list[tuple[int, GradientsConfig]] = []
    for step in scheduled.changes:
        settings = scheduled.at(step)
        if not found or found[-1][1] != settings:
            found.append((step, settings))
    return found
