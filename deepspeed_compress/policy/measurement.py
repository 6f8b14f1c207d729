"""What was measured of all candidates in one step, and how long a step would take with others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_compress.policy.alpha_beta import AlphaBeta

__all__ = ["Choice", "Measurement", "WeightCosts"]

ALL_HIDDEN = 0.1
"""Part of the messages that may be waited for where backward hides what it can: the last of them always are."""


@dataclass(frozen=True, order=True)
class Choice:
    """Numbers of candidates: one for each group of parameters, and the one of weights."""

    gradients: tuple[int, ...]
    weights: int = 0


@dataclass(frozen=True)
class WeightCosts:
    """Of weights, by candidate: bytes that a rank sends in a step, and seconds of encoding and decoding them.

    `overlap`: they travel while the next forward runs.
    """

    sizes: tuple[float, ...] = (0.0,)
    codec_seconds: tuple[float, ...] = (0.0,)
    overlap: bool = False


@dataclass(frozen=True)
class Measurement:
    """What all ranks measured together after a step, by candidate; the same on every rank.

    `errors`: squared error by group of parameters (of PowerSGD that of messages which cost as many steps), and `norms`:
    squared norm of the groups. `sizes`: bytes a rank sends in a step, by group. `codec_seconds`: encoding and decoding
    of a step. `waits`: messages of a step each of which waits for the one before, so that backward hides nothing of
    this candidate; 0 of others. `waited`: seconds in which the step waited for messages. `step`: seconds of a step.
    """

    errors: tuple[tuple[float, ...], ...]
    norms: tuple[float, ...]
    sizes: tuple[tuple[float, ...], ...]
    codec_seconds: tuple[float, ...]
    link: AlphaBeta
    waited: float
    step: float
    waits: tuple[int, ...] = ()
    weights: WeightCosts = WeightCosts()

    @property
    def known(self) -> bool:
        """Whether the gradients were finite: of others nothing can be told."""
        return math.isfinite(sum(self.norms))

    def error(self, gradients: Sequence[int]) -> float:
        """Relative error when group g has candidate `gradients[g]`."""
        whole = sum(self.norms)
        lost = sum(self.errors[candidate][group] for group, candidate in enumerate(gradients))
        return (lost / whole) ** 0.5 if whole else 0.0

    def gradient_bytes(self, gradients: Sequence[int]) -> float:
        return sum(self.sizes[candidate][group] for group, candidate in enumerate(gradients))

    def bytes(self, choice: Choice) -> float:
        """Of gradients and weights."""
        return self.gradient_bytes(choice.gradients) + self.weights.sizes[choice.weights]

    def seconds(self, choice: Choice, room: float) -> float:
        """What `choice` adds to a step; `room`: seconds of messages that a step hides, of those that it can hide."""
        hideable, late = self._travel(choice)
        return self._codec(choice) + late + max(0.0, hideable - room)

    def step_seconds(self, choice: Choice, now: Choice, room: float) -> float:
        """What a step takes with `choice`, when it was measured with `now`."""
        return max(0.0, self.step - self.seconds(now, room)) + self.seconds(choice, room)

    def room(self, now: Choice, before: float) -> float:
        """Seconds of messages that a step hides, measured with `now`; `before`: what was known of it.

        Messages that are all hidden show that there is so much room at least; those of which backward hides nothing do
        not tell.
        """
        hideable, late = self._travel(now)
        left = max(0.0, self.waited - late)
        if not hideable or left <= ALL_HIDDEN * hideable:
            return max(before, hideable)
        return max(0.0, hideable - left)

    def _travel(self, choice: Choice) -> tuple[float, float]:
        """Seconds of messages: of those that a step may hide, and of those that it waits for."""
        gradients = self.gradient_bytes(choice.gradients) * self.link.seconds_per_byte
        weights = self.weights.sizes[choice.weights] * self.link.seconds_per_byte
        waits = max((self.waits[one] for one in choice.gradients), default=0) if self.waits else 0
        hideable = (0.0 if waits else gradients) + (weights if self.weights.overlap else 0.0)
        return hideable, gradients + weights - hideable + waits * self.link.latency

    def _codec(self, choice: Choice) -> float:
        shares = [sum(column) for column in self.sizes]
        gradients = sum(
            self.sizes[one][group] / shares[one] * self.codec_seconds[one]
            for group, one in enumerate(choice.gradients)
            if shares[one]
        )
        return gradients + self.weights.codec_seconds[choice.weights]
