"""When an adaptive choice is made, and which one holds: every so many steps, and when steps become much slower."""

import statistics
import warnings
from collections.abc import Mapping
from typing import Any

from deepspeed_compress.config import CompressConfig, GradientsConfig, settings_of, written
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.policy.adaptive import Adaptive, Measurement
from deepspeed_compress.policy.observation import Observation

__all__ = ["Adaptation"]

WINDOW = 32
SLOWER = 1.5
"""Times the median step that the last ones must take for another measurement out of turn."""
RECENT = 3
REST = 8
"""Steps between measurements at least."""
REST_OF_MODEL = "."
"""In place of a pattern: the parameters that match none."""


class Adaptation:
    """The choice in force. It begins with what the configuration says."""

    def __init__(self, config: CompressConfig) -> None:
        assert config.adaptive is not None
        self.adaptive = Adaptive(config)
        self._every = config.adaptive.probe_every
        self._choice = (0,) * (len(self.adaptive.groups) + 1)
        self._next = 1
        """Optimizer step (0-based) of the next measurement, or the first one after it."""
        self._last = 0
        self._paces: tuple[float, ...] = ()

    @property
    def settings(self) -> GradientsConfig:
        """Settings of `gradients` in force."""
        return self.adaptive.settings(self._choice)

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

    def choose(self, step: int, seen: Measurement) -> tuple[GradientsConfig, GradientsConfig, Mapping[str, float]]:
        """The settings before and after a choice by what was measured in the step that ended as `step`, and why.

        What is not `known` changes nothing, and is measured again soon.
        """
        before = self.settings
        if not seen.known:
            self._next = step + REST
            return before, before, {}
        choice = self.adaptive.choose(self._choice, seen, step)
        # The first steps of a program are slower than others, so what was chosen by them is soon looked at again.
        rest = min(self._every, max(REST, step))
        self._choice, self._last, self._next, self._paces = choice.candidates, step, step + rest, ()
        return before, self.settings, choice.evidence

    def saved(self) -> dict[str, Any]:
        """What later choices depend on, as JSON has it."""
        chosen = [(place, self.adaptive.candidates[one]) for place, one in zip(self._places, self._choice, strict=True)]
        # Of equal patterns the first counts, as when parameters are matched.
        choice = {place: written(settings) for place, settings in reversed(chosen)}
        return {"choice": choice, "next": self._next, "last": self._last, "paces": self._paces}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` gave. Choices are settings, so that the order of candidates and of groups, which may
        have been edited, means nothing. CompressWarning for those that are no candidates any more."""
        self._paces, self._next, self._last = tuple(saved["paces"]), saved["next"], saved["last"]
        # States of before hold places in a list of which nobody knows whether it is the same.
        choice = saved["choice"] if isinstance(saved["choice"], Mapping) else {}
        known = {place: settings_of(text) for place, text in choice.items()}
        lost = [place for place in self._places if known.get(place) not in self.adaptive.candidates]
        self._choice = tuple(
            0 if place in lost else self.adaptive.candidates.index(known[place]) for place in self._places
        )
        if lost:
            self._next = min(self._next, self._last + REST)
            warnings.warn(_lost(lost), CompressWarning, stacklevel=2)

    @property
    def _places(self) -> tuple[str, ...]:
        return (*self.adaptive.groups, REST_OF_MODEL)


def _lost(places: list[str]) -> str:
    return (
        "/deepspeed_compress/adaptive: the checkpoint has no choice that is still among the candidates for parameters "
        f"{', '.join(repr(place) for place in places)}; they start with what gradients says, until the next measurement"
    )
