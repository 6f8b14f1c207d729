"""When an adaptive choice is made, and which one holds: every so many steps, and when steps become much slower."""

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
"""Times the median step that the last ones must take for another measurement out of turn."""
RECENT = 3
REST = 8
"""Steps between measurements at least."""
REST_OF_MODEL = "."
"""In place of a pattern: the parameters that match none."""


@dataclass(frozen=True)
class Chosen:
    """Settings of gradients; and of weights, where these are chosen too."""

    gradients: GradientsConfig
    weights: WeightsConfig | None = None

    @property
    def text(self) -> str:
        return brief(self.gradients) + ("" if self.weights is None else f", weights {brief(self.weights)}")


class Adaptation:
    """The choice in force. It begins with what the configuration says."""

    def __init__(self, config: CompressConfig, available: Available = Available()) -> None:  # noqa: B008  (frozen)
        assert config.adaptive is not None
        self.adaptive = Adaptive(config, available)
        self._every = config.adaptive.probe_every
        self._choice = Choice((0,) * (len(self.adaptive.groups) + 1))
        self._room = 0.0
        """Seconds of messages that a step hides, as far as measurements have shown it."""
        self._next = 1
        """Optimizer step (0-based) of the next measurement, or the first one after it."""
        self._last = 0
        self._paces: tuple[float, ...] = ()

    @property
    def settings(self) -> GradientsConfig:
        """Settings of `gradients` in force."""
        return self.adaptive.settings(self._choice.gradients)

    @property
    def weights(self) -> WeightsConfig:
        """Settings of `weights` in force."""
        return self.adaptive.weights[self._choice.weights]

    @property
    def chosen(self) -> Chosen:
        """What is in force, and may be another after the next measurement."""
        return Chosen(self.settings, self.weights if len(self.adaptive.weights) > 1 else None)

    def due(self, step: int) -> bool:
        """Whether optimizer step `step` (0-based) is to be measured."""
        return step >= self._next

    def observe(self, seen: Observation) -> None:
        """Measure out of turn when steps have become much slower."""
        if seen.step_ms is None:
            return
        self._paces = (*self._paces, seen.step_ms)[-WINDOW:]
        recent, before = self._paces[-RECENT:], self._paces[:-RECENT]
        slow = len(before) >= RECENT and min(recent) > SLOWER * statistics.median(before)
        if slow and seen.step >= self._last + REST:
            self._next = min(self._next, seen.step)

    def choose(self, step: int, seen: Measurement) -> tuple[Chosen, Chosen, Mapping[str, float]]:
        """The settings before and after a choice by what was measured in the step that ended as `step`, and why.

        What is not `known` changes nothing, and is measured again soon.
        """
        before = self.chosen
        if not seen.known:
            self._next = step + REST
            return before, before, {}
        decision = self.adaptive.choose(self._choice, self._of_usual_pace(seen), step, self._room)
        # The first steps of a program are slower than others, so what was chosen by them is soon looked at again.
        rest = min(self._every, REST) if step < REST else self._every
        self._choice, self._room = decision.choice, decision.room
        self._last, self._next, self._paces = step, step + rest, ()
        return before, self.chosen, decision.evidence

    def _of_usual_pace(self, seen: Measurement) -> Measurement:
        """A single step may be slow by chance: the median of those since the last choice stands for it."""
        return replace(seen, step=statistics.median(self._paces) / 1e3) if len(self._paces) >= RECENT else seen

    def saved(self) -> dict[str, Any]:
        """What later choices depend on, as JSON has it."""
        numbers = zip(self._places, self._choice.gradients, strict=True)
        chosen = [(place, self.adaptive.candidates[one]) for place, one in numbers]
        # Of equal patterns the first counts, as when parameters are matched.
        choice = {place: written(settings) for place, settings in reversed(chosen)}
        timing = {"next": self._next, "last": self._last, "paces": self._paces, "room": self._room}
        return {"choice": choice, "weights": written(self.weights), **timing}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` gave. Choices are settings, so that the order of candidates and of groups, which may
        have been edited, means nothing. CompressWarning for those that are no candidates any more."""
        self._paces, self._next, self._last = tuple(saved["paces"]), saved["next"], saved["last"]
        self._room = saved.get("room", 0.0)
        # States of before hold places in a list of which nobody knows whether it is the same.
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
        """The candidate of weights that was saved, None where it is none any more. States of before have none, and
        where weights are not chosen what is written holds, as it does without `adaptive`."""
        if "weights" not in saved or len(self.adaptive.weights) == 1:
            return 0
        settings = weights_of(saved["weights"])
        return self.adaptive.weights.index(settings) if settings in self.adaptive.weights else None

    @property
    def _places(self) -> tuple[str, ...]:
        return (*self.adaptive.groups, REST_OF_MODEL)


def _lost(what: str) -> str:
    return (
        "/deepspeed_compress/adaptive: the checkpoint has no choice that is still among the candidates for "
        f"{what}; they start with what is written, until the next measurement"
    )
