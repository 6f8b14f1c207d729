"""The cheapest settings that lose no more than is allowed, on this network and of these gradients.

What a candidate costs: the time of its codec, and that of its bytes on the link (`alpha_beta`), as far as the
backward pass does not hide it. What it loses: the relative error ||x - C(x)|| / ||x|| of a sample of the gradients,
without error feedback, which makes up for a part of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config import Adaptive as AdaptiveConfig
from deepspeed_compress.config import CompressConfig, CompressedGradients, GradientsConfig, patched, written
from deepspeed_compress.policy.alpha_beta import AlphaBeta

__all__ = ["Adaptive", "Choice", "Measurement", "allocate"]

USUAL: tuple[Mapping[str, Any], ...] = (
    {"method": "blockwise", "bits": 8},
    {"method": "blockwise", "bits": 4},
    {"method": "blockwise", "bits": 2},
    {"method": "sign"},
    {"method": "topk", "density": 0.1, "values": {"method": "blockwise", "bits": 4}},
    {"method": "topk", "density": 0.01, "values": {"method": "blockwise", "bits": 4}},
)
"""Where the configuration has no candidates."""
CLOSE = 0.01
"""Of candidates that differ by less than this part of a step, the one that loses least is taken."""


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

    def choose(self, now: Sequence[int], seen: Measurement) -> Choice:
        """The candidates to use from now on; `now` those in force, which stay unless others are clearly better.

        `seen` must be `known`.
        """
        step, current = seen.step, tuple(now)
        options = {(one,) * len(now) for one in range(len(self.candidates))} | {allocate(seen, self._config.max_error)}
        allowed = sorted(option for option in options if seen.error(option) <= self._config.max_error)
        times = {option: seen.seconds(option, now) for option in allowed}
        fastest = min(times.values())
        gentle = min((one for one in allowed if times[one] <= fastest + CLOSE * step), key=seen.error)
        slack = max(self._config.margin * times.get(current, 0.0), 2 * CLOSE * step)
        stays = current in times and times[current] < fastest + slack and seen.error(current) <= seen.error(gentle)
        chosen = current if stays else gentle
        evidence = {
            "error": seen.error(chosen),
            "seconds": times[chosen],
            "seconds_before": seen.seconds(current, now),
            "bytes": seen.bytes(chosen),
            "bandwidth": seen.link.bandwidth,
            "latency": seen.link.latency,
        }
        return Choice(chosen, evidence)


def allocate(seen: Measurement, max_error: float) -> tuple[int, ...]:
    """A candidate for each group: fewest bytes first, then more where a byte removes most of the error, until the whole
    is within `max_error`."""
    groups, candidates = range(len(seen.norms)), range(len(seen.sizes))
    choice = [min(candidates, key=lambda one: (seen.sizes[one][group], one)) for group in groups]
    while seen.error(choice) > max_error:
        upgrades = [
            (_gain(seen, group, choice[group], one), group, one)
            for group in groups
            for one in candidates
            if seen.errors[one][group] < seen.errors[choice[group]][group]
        ]
        if not upgrades:
            break
        _, group, one = max(upgrades)
        choice[group] = one
    return tuple(choice)


def _gain(seen: Measurement, group: int, before: int, after: int) -> float:
    """Error that goes for a byte."""
    more = seen.sizes[after][group] - seen.sizes[before][group]
    return (seen.errors[before][group] - seen.errors[after][group]) / max(more, 1.0)


_OF_ALL = frozenset({"overrides", "min_numel", "chunk_bytes", "hierarchy", "error_feedback", "rotation"})
"""What belongs to all gradients, and not to an override."""


def _override(settings: GradientsConfig) -> dict[str, Any]:
    """`settings` as an override has them."""
    return {key: value for key, value in written(settings).items() if key not in _OF_ALL}
