"""Adaptive choice of the settings that reach a loss soonest on this network and with these gradients.

The cost of a candidate is the time of its codec plus the time of its bytes on the link (`measurement`), minus what the
backward pass hides. Its loss of information is the relative error ||x - C(x)|| / ||x|| of a sample of the gradients,
without error feedback, or a known constant of its method. A higher cost makes each step slower; a larger error makes
more steps necessary (`penalty`). Settings of gradients and weights are chosen together, and their penalties multiply.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from deepspeed_compress.config import (
    CompressConfig,
    CompressedGradients,
    GradientsConfig,
    WeightsConfig,
)
from deepspeed_compress.config.candidates import gradient_candidates, weight_candidates
from deepspeed_compress.config.schedules import patched, written
from deepspeed_compress.policy.measurement import Choice, Measurement
from deepspeed_compress.policy.penalty import penalty, weights_penalty

CLOSE = 0.01
"""Relative difference below which predictions count as equal; the candidate with the smallest error is then chosen."""
MAX_ERROR_WITHOUT_FEEDBACK = 0.3
"""Default of `max_error` without error feedback, which the penalty curves assume."""


@dataclass(frozen=True)
class Decision:
    """A choice, its `evidence`, and the result of `Measurement.hidden_seconds` at the time."""

    choice: Choice
    hidden: float
    evidence: Mapping[str, float]


class CandidateSelector:
    """Selector of candidates for gradients and, if they are sent as `differences`, weights; see `config.adaptive`."""

    def __init__(self, config: CompressConfig, differences: bool = False) -> None:
        assert config.adaptive is not None
        self._config = config.adaptive
        without_feedback = isinstance(config.gradients, CompressedGradients) and config.gradients.residuals is None
        default = MAX_ERROR_WITHOUT_FEEDBACK if without_feedback else math.inf
        self._max_error = config.adaptive.max_error or default
        self.candidates: tuple[GradientsConfig, ...] = gradient_candidates(config)
        """The configured settings, then no compression, then the other candidates."""
        self.weights: tuple[WeightsConfig, ...] = weight_candidates(config, differences)
        """The configured settings first; they are the only candidate if weights are not chosen."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Return the patterns of parameter groups. Parameters that match none form the last group."""
        return self._config.groups

    def settings(self, gradients: Sequence[int]) -> GradientsConfig:
        """Return settings of `gradients` with candidate `gradients[g]` for group g."""
        rest = self.candidates[gradients[-1]]
        overrides = [
            {"parameters": pattern, **_override(self.candidates[gradient])}
            for pattern, gradient in zip(self.groups, gradients, strict=False)
            if gradient != gradients[-1]
        ]
        if not overrides:
            return rest
        # Only a compressing method has overrides. If the rest is "none", another method carries them.
        if not isinstance(rest, CompressedGradients):
            compressed = (self.candidates[gradient] for gradient in gradients)
            rest = next(one for one in compressed if isinstance(one, CompressedGradients))
            overrides.append({"parameters": ".", "method": "none"})
        known = [written(override) for override in rest.overrides]
        return patched(rest, {"overrides": [*known, *overrides]})

    def choose(self, now: Choice, seen: Measurement, step: int, hidden_before: float = 0.0) -> Decision:
        """Return the choice for the next steps; it stays `now` unless another choice is clearly better.

        Args:
            now: the choice in force.
            seen: a measurement with `is_finite`.
            step: optimizer steps done.
            hidden_before: `hidden` of the previous decision.
        """
        hidden = seen.hidden_seconds(now, hidden_before)
        times = {one: self._predicted(seen, one, now, step, hidden) for one in self._allowed(now, seen, step)}
        shortest = min(times.values())

        def inaccuracy(one: Choice) -> tuple[float, float]:
            return self._penalty(seen, one, step), seen.error(one.gradients)

        best = min((one for one in times if times[one] <= (1 + CLOSE) * shortest), key=inaccuracy)
        close = times.get(now, math.inf) <= (1 + self._config.margin) * shortest
        chosen = now if close and inaccuracy(now) <= inaccuracy(best) else best
        evidence = {
            "error": seen.error(chosen.gradients),
            "penalty": penalty(seen.error(chosen.gradients), step),
            "weights_penalty": self._weights_penalty(chosen, step),
            "step_seconds": seen.step_seconds(chosen, now, hidden),
            "predicted": times[chosen],
            "predicted_before": self._predicted(seen, now, now, step, hidden),
            "bytes": seen.bytes(chosen),
            "bandwidth": seen.link.bandwidth,
            "latency": seen.link.latency,
        }
        return Decision(chosen, hidden, evidence)

    def _allowed(self, now: Choice, seen: Measurement, step: int) -> list[Choice]:
        """Return every choice of gradients with a small enough error, combined with every choice of weights."""
        uniform = ((one,) * len(now.gradients) for one in range(len(self.candidates)))
        options = {now.gradients, *uniform, *allocations(seen)}
        errors = {option: seen.error(option) for option in options}
        gradients = [one for one in options if errors[one] <= self._max_error and penalty(errors[one], step) < math.inf]
        return sorted(Choice(*pair) for pair in product(gradients, range(len(self.weights))))

    def _predicted(self, seen: Measurement, choice: Choice, now: Choice, step: int, hidden: float) -> float:
        """Return the seconds that `choice` needs for the progress of one uncompressed step."""
        return self._penalty(seen, choice, step) * seen.step_seconds(choice, now, hidden)

    def _penalty(self, seen: Measurement, choice: Choice, step: int) -> float:
        return penalty(seen.error(choice.gradients), step) * self._weights_penalty(choice, step)

    def _weights_penalty(self, choice: Choice, step: int) -> float:
        """Return the penalty of the weights, or 1 if weights are not chosen and all choices share it."""
        return weights_penalty(self.weights[choice.weights], step) if len(self.weights) > 1 else 1.0


def allocations(seen: Measurement) -> Iterator[tuple[int, ...]]:
    """Yield candidates for each group: first the smallest, then upgrades where a byte removes the most error."""
    groups, candidates = range(len(seen.norms)), range(len(seen.sizes))
    choice = [min(candidates, key=lambda candidate: (seen.sizes[candidate][group], candidate)) for group in groups]
    while True:
        yield tuple(choice)
        upgrades = [
            (_gain(seen, group, choice[group], one), group, one)
            for group in groups
            for one in candidates
            if seen.errors[one][group] < seen.errors[choice[group]][group]
        ]
        if not upgrades:
            return
        _, group, one = max(upgrades)
        choice[group] = one


def _gain(seen: Measurement, group: int, before: int, after: int) -> float:
    """Return the squared error that each additional byte removes."""
    more = seen.sizes[after][group] - seen.sizes[before][group]
    return (seen.errors[before][group] - seen.errors[after][group]) / max(more, 1.0)


_NOT_IN_OVERRIDES = frozenset({"overrides", "min_numel", "chunk_bytes", "hierarchy", "error_feedback", "rotation"})
"""Keys that apply to all gradients and cannot stand in an override."""


def _override(settings: GradientsConfig) -> dict[str, Any]:
    """Return `settings` in the form of an override."""
    return {key: value for key, value in written(settings).items() if key not in _NOT_IN_OVERRIDES}
