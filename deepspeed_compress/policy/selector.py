"""Adaptive choice of the settings that reach a loss soonest on this network and with these gradients.

The cost of a candidate is the time of its codec plus the time of its bytes on the link (`measurement`), minus what the
backward pass hides. Its loss of information is the relative error ||x - C(x)|| / ||x|| of a sample of the gradients,
without error feedback, or a known constant of its method. A higher cost makes each step slower; a larger error makes
more steps necessary (`penalty`). Settings of gradients and weights are chosen together, and their penalties multiply.

Penalties come from measurements (docs/results.md, "Adaptive"). Coarse messages cost many steps early in training and
far fewer later. If settings of equal error differ, the curve has the larger number, so a choice is never worse than
predicted. The error of one message determines the cost of a quantizer or a sparsifier. It does not determine that of
weights, whose next difference contains what the last one left out. Their costs are tabulated by method.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from deepspeed_compress.config import CompressConfig, CompressedGradients, GradientsConfig, WeightsConfig
from deepspeed_compress.config.candidates import gradient_candidates, weight_candidates
from deepspeed_compress.config.places import BlockwiseWeights, SignWeights
from deepspeed_compress.config.schedules import patched, written
from deepspeed_compress.policy.measurement import Choice, Measurement

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
        self.groups = config.adaptive.groups
        """Patterns of parameter groups. Parameters that match none form the last group."""
        without_feedback = isinstance(config.gradients, CompressedGradients) and config.gradients.residuals is None
        default = MAX_ERROR_WITHOUT_FEEDBACK if without_feedback else math.inf
        self._max_error = config.adaptive.max_error or default
        self.candidates: tuple[GradientsConfig, ...] = gradient_candidates(config)
        """The configured settings, then no compression, then the other candidates."""
        self.weights: tuple[WeightsConfig, ...] = weight_candidates(config, differences)
        """The configured settings first; they are the only candidate if weights are not chosen."""

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
            seen: a measurement of finite gradients.
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


Curve = tuple[tuple[float, float], ...]
"""Points (relative error, steps needed per step of uncompressed training), in ascending order."""

CURVES: Mapping[int, Curve] = {
    90: ((0.0, 1.0), (0.01, 1.0), (0.15, 1.04), (0.38, 1.5), (0.65, 1.8), (1.0, 2.0)),
    500: ((0.0, 1.0), (0.15, 1.0), (0.38, 1.08), (0.65, 1.4), (1.0, 1.5)),
}
"""Curves for gradients, by optimizer step."""
WEIGHTS: Mapping[int, Curve] = {
    80: ((0.0, 1.0), (0.1, 1.0), (0.38, 1.17), (0.52, 1.4), (1.0, 2.0)),
    300: ((0.0, 1.0), (0.1, 1.0), (0.38, 1.17), (0.52, 1.22), (1.0, 2.0)),
    500: ((0.0, 1.0), (0.1, 1.0), (0.38, 1.05), (0.52, 1.1), (1.0, 2.0)),
}
"""Curves for weights that are sent as differences, by the relative error of the difference of one Adam step."""
UPDATES: Mapping[tuple[str, int], float] = {
    ("blockwise", 8): 0.01,
    ("blockwise", 4): 0.1,
    ("blockwise", 3): 0.2,
    ("blockwise", 2): 0.36,
    ("sign", 3): 0.38,
    ("sign", 2): 0.52,
}
"""Relative error of the difference of one Adam step, by method and bits or levels."""


def penalty(error: float, step: int) -> float:
    """Return the steps that training needs per step of uncompressed training, at least 1.

    Args:
        error: ||x - C(x)|| / ||x|| of the gradient messages, measured without error feedback (training is assumed to
            use it).
        step: optimizer steps done. Curves are interpolated in log(step); beyond them, the nearest curve is used.

    Returns:
        A nondecreasing function of `error`. It is infinite for errors of 1 and more, where error feedback cannot catch
        up, and for NaN.
    """
    return _at_step(CURVES, error, step)


def weights_penalty(weights: WeightsConfig, step: int) -> float:
    """Return the penalty of `weights` that are sent as differences; 1 if uncompressed. `topk` is not supported."""
    if weights.method == "none":
        return 1.0
    assert isinstance(weights, BlockwiseWeights | SignWeights)
    levels = weights.bits if isinstance(weights, BlockwiseWeights) else weights.levels
    return _at_step(WEIGHTS, UPDATES[weights.method, levels], step)


def _at_step(curves: Mapping[int, Curve], error: float, step: int) -> float:
    if not error < 1:
        return math.inf
    logs = [(math.log(at), _interpolate(curve, error)) for at, curve in curves.items()]
    return _interpolate(tuple(logs), min(max(math.log(max(step, 1)), logs[0][0]), logs[-1][0]))


def _interpolate(curve: Curve, x: float) -> float:
    """Interpolate `curve` linearly at `x`."""
    (x_before, y), (x_next, y_next) = next(pair for pair in pairwise(curve) if x <= pair[1][0])
    return y + (y_next - y) * (x - x_before) / (x_next - x_before)
