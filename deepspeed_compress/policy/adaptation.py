"""The decider of `adaptive`: the choice in force, measured again periodically and when steps become much slower."""

import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deepspeed_compress.config import CompressConfig, GradientsConfig, WeightsConfig, settings_of, written
from deepspeed_compress.config.schedules import weights_of
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor import Event
from deepspeed_compress.policy.decider import Decider, Observation, StepPlan, settings_text
from deepspeed_compress.policy.measurement import Choice, Measurement
from deepspeed_compress.policy.selector import CandidateSelector

WINDOW = 32
SLOWDOWN = 1.5
"""Slowdown of the last steps, relative to the median step, that triggers an extra measurement."""
RECENT = 3
MIN_INTERVAL = 8
"""Minimum number of steps between measurements."""
UNMATCHED = "."
"""Name of the group of parameters that match no pattern."""


class Adaptation(Decider):
    """The choice in force, which starts with the configured settings. The warm-up of the schedule comes first."""

    def __init__(self, config: CompressConfig, record: Callable[[Event], None], differences: bool = False) -> None:
        assert config.adaptive is not None
        self.selector = CandidateSelector(config, differences)
        self._record = record
        self._every, self._warmup_steps = config.adaptive.probe_every, config.schedule.warmup_steps
        self._choice = Choice((0,) * (len(self.selector.groups) + 1))
        self._hidden = 0.0
        """Seconds of messages that a step hides, as measured so far."""
        self._next = 1
        """Optimizer step (0-based) at or after which the next measurement takes place."""
        self._last = 0
        self._step_times: tuple[float, ...] = ()

    def plan(self, step: int, plan: StepPlan) -> StepPlan:
        settings = plan.settings if plan.settings.method == "none" else self._settings
        probe = step > self._warmup_steps and step >= self._next
        return replace(plan, settings=settings, weights=self._weights, probe=probe)

    @property
    def _settings(self) -> GradientsConfig:
        return self.selector.settings(self._choice.gradients)

    @property
    def _weights(self) -> WeightsConfig:
        return self.selector.weights[self._choice.weights]

    def observe(self, seen: Observation) -> None:
        """Schedule an extra measurement if steps have become much slower."""
        if seen.step_ms is not None:
            self._step_times = (*self._step_times, seen.step_ms)[-WINDOW:]
            recent, before = self._step_times[-RECENT:], self._step_times[:-RECENT]
            slow = len(before) >= RECENT and min(recent) > SLOWDOWN * statistics.median(before)
            if slow and seen.step >= self._last + MIN_INTERVAL:
                self._next = min(self._next, seen.step)

    def choose(self, step: int, seen: Measurement) -> None:
        """Choose by the measurement of the step that ended as `step`.

        A measurement that is not finite changes nothing and is repeated soon.
        """
        if not math.isfinite(sum(seen.norms)):
            self._next = step + MIN_INTERVAL
            return
        before, text = (self._settings, self._weights), self._text
        if len(self._step_times) >= RECENT:
            # A single step may be slow by chance.
            seen = replace(seen, step=statistics.median(self._step_times) / 1e3)
        decision = self.selector.choose(self._choice, seen, step, self._hidden)
        # The first steps of a program are slower than the others, so a choice based on them is revised soon.
        interval = min(self._every, MIN_INTERVAL) if step < MIN_INTERVAL else self._every
        self._choice, self._hidden = decision.choice, decision.hidden
        self._last, self._next, self._step_times = step, step + interval, ()
        if before != (self._settings, self._weights):
            reason = "measurements predict a shorter time to a loss"
            self._record(Event(step, "adapt", reason, dict(decision.evidence), text, self._text))

    @property
    def _text(self) -> str:
        return settings_text(self._settings, self._weights if len(self.selector.weights) > 1 else None)

    def saved(self) -> dict[str, Any]:
        numbers = zip(self._group_names, self._choice.gradients, strict=True)
        chosen = [(name, self.selector.candidates[number]) for name, number in numbers]
        # Among equal patterns, the first one is used, as in the matching of parameters.
        choice = {name: written(settings) for name, settings in reversed(chosen)}
        timing = {"next": self._next, "last": self._last, "paces": self._step_times, "room": self._hidden}
        return {"adaptation": {"choice": choice, "weights": written(self._weights), **timing}}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the saved state.

        Choices are stored as settings, so the order of candidates and groups in an edited configuration has no meaning.
        Settings that are no longer among the candidates lead to a CompressWarning.
        """
        state = saved.get("adaptation")
        if state is None:
            return
        self._step_times, self._next, self._last = tuple(state["paces"]), state["next"], state["last"]
        self._hidden = state["room"]
        candidates = self.selector.candidates
        known = {name: settings_of(text) for name, text in state["choice"].items()}
        lost = [name for name in self._group_names if known.get(name) not in candidates]
        gradients = (0 if name in lost else candidates.index(known[name]) for name in self._group_names)
        # If weights are not chosen, the configured settings are the only candidate.
        weights = weights_of(state["weights"]) if len(self.selector.weights) > 1 else self.selector.weights[0]
        lost_weights = weights not in self.selector.weights
        self._choice = Choice(tuple(gradients), 0 if lost_weights else self.selector.weights.index(weights))
        if lost or lost_weights:
            self._next = min(self._next, self._last + MIN_INTERVAL)
            text = "the checkpoint's choice is no longer among the candidates, so the next measurement makes a new one"
            warnings.warn(f"/deepspeed_compress/adaptive: {text}", CompressWarning, stacklevel=3)

    @property
    def _group_names(self) -> tuple[str, ...]:
        return (*self.selector.groups, UNMATCHED)
