"""The settings with which a loss is reached soonest, on this network and of these gradients.

What a candidate costs: the time of its codec, and that of its bytes on the link (`alpha_beta`), as far as the
backward pass does not hide it. What it loses: the relative error ||x - C(x)|| / ||x|| of a sample of the gradients,
without error feedback. Steps are the slower the more they cost, and the more are needed the more is lost (`penalty`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config import Adaptive as AdaptiveConfig
from deepspeed_compress.config import CompressConfig, CompressedGradients, GradientsConfig, patched, written
from deepspeed_compress.policy.alpha_beta import AlphaBeta
from deepspeed_compress.policy.penalty import penalty

__all__ = ["Adaptive", "Choice", "Measurement", "allocations"]

USUAL: tuple[Mapping[str, Any], ...] = (
    {"method": "blockwise", "bits": 8},
    {"method": "blockwise", "bits": 4},
    {"method": "blockwise", "bits": 3},
    {"method": "blockwise", "bits": 2},
    {"method": "sign"},
    {"method": "topk", "density": 0.1, "values": {"method": "blockwise", "bits": 4}},
    {"method": "topk", "density": 0.01, "values": {"method": "blockwise", "bits": 4}},
)
"""Where the configuration has no candidates."""
CLOSE = 0.01
"""Of candidates whose predictions differ by less than this part, the one that loses least is taken."""
UNFED = 0.3
"""`max_error` where there is no error feedback, of which the penalty knows nothing."""


@dataclass(frozen=True)
class Measurement:
    """What all ranks measured together after a step, by candidate; the same on every rank.

    `errors`: squared error by group of parameters, and `norms`: squared norm of the groups. `sizes`: bytes a rank sends
    in a step, by group. `codec_seconds`: encoding and decoding of a step. `waited`: seconds in which the step waited
    for messages. `step`: seconds of a step.
    """

    errors: tuple[tuple[float, ...], ...]
    norms: tuple[float, ...]
    sizes: tuple[tuple[float, ...], ...]
    codec_seconds: tuple[float, ...]
    link: AlphaBeta
    waited: float
    step: float

    @property
    def known(self) -> bool:
        """Whether the gradients were finite: of others nothing can be told."""
        return math.isfinite(sum(self.norms))

    def error(self, choice: Sequence[int]) -> float:
        """Relative error when group g has candidate `choice[g]`."""
        whole = sum(self.norms)
        lost = sum(self.errors[candidate][group] for group, candidate in enumerate(choice))
        return (lost / whole) ** 0.5 if whole else 0.0

    def bytes(self, choice: Sequence[int]) -> float:
        return sum(self.sizes[candidate][group] for group, candidate in enumerate(choice))

    def seconds(self, choice: Sequence[int], now: Sequence[int]) -> float:
        """What `choice` adds to a step, by what is hidden of the messages of `now`, which is in force."""
        hidden = max(0.0, self._travel(now) - self.waited)
        shares = [sum(column) for column in self.sizes]
        codec = sum(
            self.sizes[one][group] / shares[one] * self.codec_seconds[one]
            for group, one in enumerate(choice)
            if shares[one]
        )
        return codec + max(0.0, self._travel(choice) - hidden)

    def step_seconds(self, choice: Sequence[int], now: Sequence[int]) -> float:
        """What a step takes with `choice`, when it was measured with `now`."""
        return max(0.0, self.step - self.seconds(now, now)) + self.seconds(choice, now)

    def _travel(self, choice: Sequence[int]) -> float:
        return self.bytes(choice) * self.link.seconds_per_byte


@dataclass(frozen=True)
class Choice:
    """A candidate for each group of parameters, and why."""

    candidates: tuple[int, ...]
    evidence: Mapping[str, float]


class Adaptive:
    """Chooses by `config.adaptive`; candidates are settings of `gradients`."""

    def __init__(self, config: CompressConfig) -> None:
        assert config.adaptive is not None
        self._config: AdaptiveConfig = config.adaptive
        unfed = isinstance(config.gradients, CompressedGradients) and config.gradients.residuals is None
        self._max_error = config.adaptive.max_error or (UNFED if unfed else math.inf)
        patches = ({"method": "none"}, *(config.adaptive.candidates or USUAL))
        made = (config.gradients, *(patched(config.gradients, patch) for patch in patches))
        self.candidates: tuple[GradientsConfig, ...] = tuple(dict.fromkeys(made))
        """What is written first, then no compression, then the others."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Patterns of groups of parameters; what matches none is a group of its own, the last."""
        return self._config.groups

    def settings(self, choice: Sequence[int]) -> GradientsConfig:
        """Settings of `gradients` with candidate `choice[g]` for group g."""
        rest = self.candidates[choice[-1]]
        overrides = [
            {"parameters": pattern, **_override(self.candidates[one])}
            for pattern, one in zip(self.groups, choice, strict=False)
            if one != choice[-1]
        ]
        if not overrides:
            return rest
        # Overrides belong to a method that compresses; with "none" for the rest another one carries them.
        if not isinstance(rest, CompressedGradients):
            compressed = (self.candidates[one] for one in choice)
            rest = next(one for one in compressed if isinstance(one, CompressedGradients))
            overrides.append({"parameters": ".", "method": "none"})
        known = [written(one) for one in rest.overrides]
        return patched(rest, {"overrides": [*known, *overrides]})

    def choose(self, now: Sequence[int], seen: Measurement, step: int) -> Choice:
        """The candidates to use from now on; `now` those in force, which stay unless others are clearly better.

        `seen` must be `known`. `step`: optimizer steps done.
        """
        current = tuple(now)
        options = {current, *((one,) * len(now) for one in range(len(self.candidates))), *allocations(seen)}
        allowed = sorted(one for one in options if self._allows(seen.error(one), step))
        times = {one: _predicted(seen, one, now, step) for one in allowed}
        soonest = min(times.values())
        gentle = min((one for one in allowed if times[one] <= (1 + CLOSE) * soonest), key=seen.error)
        close = times.get(current, math.inf) <= (1 + self._config.margin) * soonest
        stays = close and seen.error(current) <= seen.error(gentle)
        chosen = current if stays else gentle
        evidence = {
            "error": seen.error(chosen),
            "penalty": penalty(seen.error(chosen), step),
            "step_seconds": seen.step_seconds(chosen, now),
            "predicted": times[chosen],
            "predicted_before": _predicted(seen, current, now, step),
            "bytes": seen.bytes(chosen),
            "bandwidth": seen.link.bandwidth,
            "latency": seen.link.latency,
        }
        return Choice(chosen, evidence)

    def _allows(self, error: float, step: int) -> bool:
        return math.isfinite(penalty(error, step)) and error <= self._max_error


def _predicted(seen: Measurement, choice: Sequence[int], now: Sequence[int], step: int) -> float:
    """Seconds with `choice` until training is where one uncompressed step would bring it."""
    return penalty(seen.error(choice), step) * seen.step_seconds(choice, now)


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
