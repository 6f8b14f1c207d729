"""The settings with which a loss is reached soonest, on this network and of these gradients.

What a candidate costs: the time of its codec, and that of its bytes on the link (`measurement`), as far as the backward
pass does not hide it. What it loses: the relative error ||x - C(x)|| / ||x|| of a sample of the gradients, without
error feedback, or what is known of its method. Steps are the slower the more they cost, and the more are needed the
more is lost (`penalty`). Settings of gradients and of weights are chosen together: their penalties multiply.
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
    PowerSGDGradients,
    WeightsConfig,
    gradient_candidates,
    patched,
    weight_candidates,
    written,
)
from deepspeed_compress.policy.measurement import Choice, Measurement
from deepspeed_compress.policy.penalty import penalty, weights_penalty

__all__ = ["Adaptive", "Available", "Decision", "allocations"]

CLOSE = 0.01
"""Of candidates whose predictions differ by less than this part, the one that loses least is taken."""
UNFED = 0.3
"""`max_error` where there is no error feedback, of which the penalty knows nothing."""


@dataclass(frozen=True)
class Available:
    """What an engine lets be chosen. `low_rank`: PowerSGD is a usual candidate, whose ranks must compute equal bits.
    `weights`: settings of weights, which travel as differences."""

    low_rank: bool = True
    weights: bool = False


@dataclass(frozen=True)
class Decision:
    """What is in force from now on, and why. `room`: as of `Measurement.room`."""

    choice: Choice
    room: float
    evidence: Mapping[str, float]


class Adaptive:
    """Chooses by `config.adaptive` among settings of gradients, and of weights where they are `available`."""

    def __init__(self, config: CompressConfig, available: Available = Available()) -> None:
        assert config.adaptive is not None
        self._config = config.adaptive
        unfed = isinstance(config.gradients, CompressedGradients) and config.gradients.residuals is None
        self._max_error = config.adaptive.max_error or (UNFED if unfed else math.inf)
        self.candidates: tuple[GradientsConfig, ...] = gradient_candidates(config, available.low_rank)
        """What is written first, then no compression, then the others."""
        self.weights: tuple[WeightsConfig, ...] = weight_candidates(config, available.weights)
        """What is written first; alone where settings of weights are not chosen."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Patterns of groups of parameters; what matches none is a group of its own, the last."""
        return self._config.groups

    def settings(self, gradients: Sequence[int]) -> GradientsConfig:
        """Settings of `gradients` with candidate `gradients[g]` for group g."""
        rest = self.candidates[gradients[-1]]
        overrides = [
            {"parameters": pattern, **_override(self.candidates[one])}
            for pattern, one in zip(self.groups, gradients, strict=False)
            if one != gradients[-1]
        ]
        if not overrides:
            return rest
        # Overrides belong to a method that compresses; with "none" for the rest another one carries them.
        if not isinstance(rest, CompressedGradients):
            compressed = (self.candidates[one] for one in gradients)
            rest = next(one for one in compressed if isinstance(one, CompressedGradients))
            overrides.append({"parameters": ".", "method": "none"})
        known = [written(one) for one in rest.overrides]
        return patched(rest, {"overrides": [*known, *overrides]})

    def choose(self, now: Choice, seen: Measurement, step: int, room_before: float = 0.0) -> Decision:
        """What to use from now on; `now` is in force, and stays unless others are clearly better.

        `seen` must be `known`. `step`: optimizer steps done. `room_before`: of the last decision.
        """
        room = seen.room(now, room_before)
        times = {one: self._predicted(seen, one, now, step, room) for one in self._allowed(now, seen, step)}
        soonest = min(times.values())

        def loses(one: Choice) -> tuple[float, float]:
            return self._penalty(seen, one, step), seen.error(one.gradients)

        gentle = min((one for one in times if times[one] <= (1 + CLOSE) * soonest), key=loses)
        close = times.get(now, math.inf) <= (1 + self._config.margin) * soonest
        chosen = now if close and loses(now) <= loses(gentle) else gentle
        evidence = {
            "error": seen.error(chosen.gradients),
            "penalty": penalty(seen.error(chosen.gradients), step),
            "weights_penalty": self._weights_penalty(chosen, step),
            "step_seconds": seen.step_seconds(chosen, now, room),
            "predicted": times[chosen],
            "predicted_before": self._predicted(seen, now, now, step, room),
            "bytes": seen.bytes(chosen),
            "bandwidth": seen.link.bandwidth,
            "latency": seen.link.latency,
        }
        return Decision(chosen, room, evidence)

    def _allowed(self, now: Choice, seen: Measurement, step: int) -> list[Choice]:
        """Every choice of gradients that loses little enough, with every choice of weights."""
        uniform = ((one,) * len(now.gradients) for one in range(len(self.candidates)))
        options = {now.gradients, *uniform, *allocations(seen)}
        gradients = (one for one in options if self._can_be(one) and self._loses_little(seen.error(one), step))
        return sorted(Choice(*pair) for pair in product(gradients, range(len(self.weights))))

    def _can_be(self, gradients: Sequence[int]) -> bool:
        """PowerSGD is the method of all gradients, of which some have another one: no override has factors."""
        apart = (self.candidates[one] for one in gradients if one != gradients[-1])
        return not any(isinstance(one, PowerSGDGradients) for one in apart)

    def _loses_little(self, error: float, step: int) -> bool:
        return math.isfinite(penalty(error, step)) and error <= self._max_error

    def _predicted(self, seen: Measurement, choice: Choice, now: Choice, step: int, room: float) -> float:
        """Seconds with `choice` until training is where one uncompressed step would bring it."""
        return self._penalty(seen, choice, step) * seen.step_seconds(choice, now, room)

    def _penalty(self, seen: Measurement, choice: Choice, step: int) -> float:
        return penalty(seen.error(choice.gradients), step) * self._weights_penalty(choice, step)

    def _weights_penalty(self, choice: Choice, step: int) -> float:
        """1 where settings of weights are not chosen: what all have in common changes nothing."""
        return weights_penalty(self.weights[choice.weights], step) if len(self.weights) > 1 else 1.0


def allocations(seen: Measurement) -> Iterator[tuple[int, ...]]:
    """Candidates for each group: first those of fewest bytes, then more and more where a byte removes most error."""
    groups, candidates = range(len(seen.norms)), range(len(seen.sizes))
    choice = [min(candidates, key=lambda one: (seen.sizes[one][group], one)) for group in groups]
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
    """Error that goes for a byte."""
    more = seen.sizes[after][group] - seen.sizes[before][group]
    return (seen.errors[before][group] - seen.errors[after][group]) / max(more, 1.0)


_OF_ALL = frozenset({"overrides", "min_numel", "chunk_bytes", "hierarchy", "error_feedback", "rotation"})
"""What belongs to all gradients, and not to an override."""


def _override(settings: GradientsConfig) -> dict[str, Any]:
    """`settings` as an override has them."""
    return {key: value for key, value in written(settings).items() if key not in _OF_ALL}
