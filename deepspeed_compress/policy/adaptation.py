"""The adaptive choice in force, and its timing: periodically, and when steps become much slower."""

import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_compress.config import CompressConfig, GradientsConfig, WeightsConfig, brief, settings_of, written
from deepspeed_compress.config.patches import weights_of
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.policy.adaptive import AllowedChoices, CandidateSelector
from deepspeed_compress.policy.measurement import Choice, Measurement
from deepspeed_compress.policy.observation import Observation

WINDOW = 32
SLOWDOWN = 1.5
"""Slowdown of the last steps, relative to the median step, that triggers an extra measurement."""
RECENT = 3
MIN_INTERVAL = 8
"""Minimum number of steps between measurements."""
UNMATCHED = "."
"""Name of the group of parameters that match no pattern."""


@dataclass(frozen=True)
class ChosenSettings:
    """Settings of gradients, and of weights if these are chosen too."""

    gradients: GradientsConfig
    weights: WeightsConfig | None = None

    @property
    def text(self) -> str:
        return brief(self.gradients) + ("" if self.weights is None else f", weights {brief(self.weights)}")


class Adaptation:
    """The choice in force, which starts with the configured settings."""

    def __init__(self, config: CompressConfig, available: AllowedChoices = AllowedChoices()) -> None:  # noqa: B008  (frozen)
        assert config.adaptive is not None
        self.adaptive = CandidateSelector(config, available)
        self._every = config.adaptive.probe_every
        self._choice = Choice((0,) * (len(self.adaptive.groups) + 1))
        self._hidden = 0.0
        """Seconds of messages that a step hides, as measured so far."""
        self._next = 1
        """Optimizer step (0-based) at or after which the next measurement takes place."""
        self._last = 0
        self._step_times: tuple[float, ...] = ()

    @property
    def settings(self) -> GradientsConfig:
        """Return the settings of `gradients` in force."""
        return self.adaptive.settings(self._choice.gradients)

    @property
    def weights(self) -> WeightsConfig:
        """Return the settings of `weights` in force."""
        return self.adaptive.weights[self._choice.weights]

    @property
    def chosen(self) -> ChosenSettings:
        """Return the settings in force; the next measurement may change them."""
        return ChosenSettings(self.settings, self.weights if len(self.adaptive.weights) > 1 else None)

    def due(self, step: int) -> bool:
        """Return True if optimizer step `step` (0-based) must be measured."""
        return step >= self._next

    def observe(self, seen: Observation) -> None:
        """Schedule an extra measurement if steps have become much slower."""
        if seen.step_ms is None:
            return
        self._step_times = (*self._step_times, seen.step_ms)[-WINDOW:]
        recent, before = self._step_times[-RECENT:], self._step_times[:-RECENT]
        slow = len(before) >= RECENT and min(recent) > SLOWDOWN * statistics.median(before)
        if slow and seen.step >= self._last + MIN_INTERVAL:
            self._next = min(self._next, seen.step)

    def choose(self, step: int, seen: Measurement) -> tuple[ChosenSettings, ChosenSettings, Mapping[str, float]]:
        """Choose by the measurement of the step that ended as `step`.

        Returns:
            The settings before, the settings after, and the evidence. A measurement that is not finite
            changes nothing and is repeated soon.
        """
        before = self.chosen
        if not seen.is_finite:
            self._next = step + MIN_INTERVAL
            return before, before, {}
        decision = self.adaptive.choose(self._choice, self._with_median_step_time(seen), step, self._hidden)
        # The first steps of a program are slower than the others, so a choice based on them is revised soon.
        interval = min(self._every, MIN_INTERVAL) if step < MIN_INTERVAL else self._every
        self._choice, self._hidden = decision.choice, decision.hidden
        self._last, self._next, self._step_times = step, step + interval, ()
        return before, self.chosen, decision.evidence

    def _with_median_step_time(self, seen: Measurement) -> Measurement:
        """Return `seen` with the median step time since the last choice; a single step may be slow by chance."""
        if len(self._step_times) < RECENT:
            return seen
        return replace(seen, step=statistics.median(self._step_times) / 1e3)

    def saved(self) -> dict[str, Any]:
        """Return everything that later choices depend on, as plain data for JSON."""
        numbers = zip(self._group_names, self._choice.gradients, strict=True)
        chosen = [(name, self.adaptive.candidates[one]) for name, one in numbers]
        # Among equal patterns, the first one is used, as in the matching of parameters.
        choice = {name: written(settings) for name, settings in reversed(chosen)}
        timing = {"next": self._next, "last": self._last, "paces": self._step_times, "room": self._hidden}
        return {"choice": choice, "weights": written(self.weights), **timing}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state that `saved` returned.

        Choices are stored as settings, so the order of candidates and groups in an edited configuration has no meaning.
        Settings that are no longer among the candidates lead to a CompressWarning.
        """
        self._step_times, self._next, self._last = tuple(saved["paces"]), saved["next"], saved["last"]
        self._hidden = saved["room"]
        known = {name: settings_of(text) for name, text in saved["choice"].items()}
        candidates = self.adaptive.candidates
        lost = [name for name in self._group_names if known.get(name) not in candidates]
        gradients = (0 if name in lost else candidates.index(known[name]) for name in self._group_names)
        weights = self._known_weights(saved)
        self._choice = Choice(tuple(gradients), weights or 0)
        if lost or weights is None:
            self._next = min(self._next, self._last + MIN_INTERVAL)
            what = [f"parameters {', '.join(map(repr, lost))}"] * bool(lost) + ["weights"] * (weights is None)
            warnings.warn(_lost_choice(" and ".join(what)), CompressWarning, stacklevel=2)

    def _known_weights(self, saved: Mapping[str, Any]) -> int | None:
        """Return the index of the saved candidate of weights, or None if it is no longer a candidate.

        If weights are not chosen, the configured settings hold (index 0).
        """
        if len(self.adaptive.weights) == 1:
            return 0
        settings = weights_of(saved["weights"])
        return self.adaptive.weights.index(settings) if settings in self.adaptive.weights else None

    @property
    def _group_names(self) -> tuple[str, ...]:
        return (*self.adaptive.groups, UNMATCHED)


def _lost_choice(what: str) -> str:
    return (
        "/deepspeed_compress/adaptive: the checkpoint's choice is no longer among the candidates for "
        f"{what}; they use the configured settings until the next measurement"
    )
