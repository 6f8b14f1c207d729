"""The adaptive choice in force, and its timing: periodically, and when steps become much slower."""

import statistics
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_compress.config import (
    CompressConfig,
    GradientsConfig,
    WeightsConfig,
    brief,
    settings_of,
    weights_of,
    written,
)
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.policy.adaptive import Adaptive, Available
from deepspeed_compress.policy.measurement import Choice, Measurement
from deepspeed_compress.policy.observation import Observation

__all__ = ["Adaptation", "Chosen"]

WINDOW = 32
SLOWER = 1.5
"""Slowdown of the last steps, relative to the median step, that triggers an extra measurement."""
RECENT = 3
REST = 8
"""Minimum number of steps between measurements."""
REST_OF_MODEL = "."
"""Name of the group of parameters that match no pattern."""


@dataclass(frozen=True)
class Chosen:
    """Settings of gradients, and of weights if these are chosen too."""

    gradients: GradientsConfig
    weights: WeightsConfig | None = None

    @property
    def text(self) -> str:
        return brief(self.gradients) + ("" if self.weights is None else f", weights {brief(self.weights)}")


class Adaptation:
    """The choice in force, which starts with the configured settings."""

    def __init__(self, config: CompressConfig, available: Available = Available()) -> None:  # noqa: B008  (frozen)
        assert config.adaptive is not None
        self.adaptive = Adaptive(config, available)
        self._every = config.adaptive.probe_every
        self._choice = Choice((0,) * (len(self.adaptive.groups) + 1))
        self._room = 0.0
        """Seconds of messages that a step hides, as measured so far."""
        self._next = 1
        """Optimizer step (0-based) at or after which the next measurement takes place."""
        self._last = 0
        self._paces: tuple[float, ...] = ()

    @property
    def settings(self) -> GradientsConfig:
        """Return the settings of `gradients` in force."""
        return self.adaptive.settings(self._choice.gradients)

    @property
    def weights(self) -> WeightsConfig:
        """Return the settings of `weights` in force."""
        return self.adaptive.weights[self._choice.weights]

    @property
    def chosen(self) -> Chosen:
        """Return the settings in force; the next measurement may change them."""
        return Chosen(self.settings, self.weights if len(self.adaptive.weights) > 1 else None)

    def due(self, step: int) -> bool:
        """Return True if optimizer step `step` (0-based) must be measured."""
        return step >= self._next

    def observe(self, seen: Observation) -> None:
        """Schedule an extra measurement if steps have become much slower."""
        if seen.step_ms is None:
            return
        self._paces = (*self._paces, seen.step_ms)[-WINDOW:]
        recent, before = self._paces[-RECENT:], self._paces[:-RECENT]
        slow = len(before) >= RECENT and min(recent) > SLOWER * statistics.median(before)
        if slow and seen.step >= self._last + REST:
            self._next = min(self._next, seen.step)

    def choose(self, step: int, seen: Measurement) -> tuple[Chosen, Chosen, Mapping[str, float]]:
        """Choose by the measurement of the step that ended as `step`.

        Returns:
            The settings before, the settings after, and the evidence. A measurement that is not `known` changes
            nothing and is repeated soon.
        """
        before = self.chosen
        if not seen.known:
            self._next = step + REST
            return before, before, {}
        decision = self.adaptive.choose(self._choice, self._of_usual_pace(seen), step, self._room)
        # The first steps of a program are slower than the others, so a choice based on them is revised soon.
        rest = min(self._every, REST) if step < REST else self._every
        self._choice, self._room = decision.choice, decision.room
        self._last, self._next, self._paces = step, step + rest, ()
        return before, self.chosen, decision.evidence

    def _of_usual_pace(self, seen: Measurement) -> Measurement:
        """Return `seen` with the median step time since the last choice; a single step may be slow by chance."""
        return replace(seen, step=statistics.median(self._paces) / 1e3) if len(self._paces) >= RECENT else seen

    def saved(self) -> dict[str, Any]:
        """Return everything that later choices depend on, as plain data for JSON."""
        numbers = zip(self._places, self._choice.gradients, strict=True)
        chosen = [(place, self.adaptive.candidates[one]) for place, one in numbers]
        # The first of equal patterns counts, as in the matching of parameters.
        choice = {place: written(settings) for place, settings in reversed(chosen)}
        timing = {"next": self._next, "last": self._last, "paces": self._paces, "room": self._room}
        return {"choice": choice, "weights": written(self.weights), **timing}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state that `saved` returned.

        Choices are stored as settings, so the order of candidates and groups in an edited configuration has no meaning.
        Settings that are no longer among the candidates lead to a CompressWarning.
        """
        self._paces, self._next, self._last = tuple(saved["paces"]), saved["next"], saved["last"]
        self._room = saved.get("room", 0.0)
        # Older state files hold indices into a list that may have changed.
        choice = saved["choice"] if isinstance(saved["choice"], Mapping) else {}
        known = {place: settings_of(text) for place, text in choice.items()}
        lost = [place for place in self._places if known.get(place) not in self.adaptive.candidates]
        gradients = (0 if place in lost else self.adaptive.candidates.index(known[place]) for place in self._places)
        weights = self._known_weights(saved)
        self._choice = Choice(tuple(gradients), weights or 0)
        if lost or weights is None:
            self._next = min(self._next, self._last + REST)
            what = [f"parameters {', '.join(map(repr, lost))}"] * bool(lost) + ["weights"] * (weights is None)
            warnings.warn(_lost(" and ".join(what)), CompressWarning, stacklevel=2)

    def _known_weights(self, saved: Mapping[str, Any]) -> int | None:
        """Return the index of the saved candidate of weights, or None if it is no longer a candidate.

        Older state files have none. If weights are not chosen, the configured settings hold (index 0).
        """
        if "weights" not in saved or len(self.adaptive.weights) == 1:
            return 0
        settings = weights_of(saved["weights"])
        return self.adaptive.weights.index(settings) if settings in self.adaptive.weights else None

    @property
    def _places(self) -> tuple[str, ...]:
        return (*self.adaptive.groups, REST_OF_MODEL)


def _lost(what: str) -> str:
    return (
        "/deepspeed_compress/adaptive: the checkpoint's choice is no longer among the candidates for "
        f"{what}; they use the configured settings until the next measurement"
    )
