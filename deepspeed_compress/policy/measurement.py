"""Measurements of all candidates in one step, and the predicted step time with each of them.

A message takes a latency plus a time per byte (Hockney's alpha-beta model).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class AlphaBeta:
    """The model t(n) = `latency` + n * `seconds_per_byte`, with the RMS relative `error` of the fit."""

    latency: float
    seconds_per_byte: float
    error: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Return the asymptotic bandwidth in bytes per second; infinite if the size has no cost."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte else float("inf")

    def seconds(self, size: float) -> float:
        """Return the predicted time of a message of `size` bytes."""
        return self.latency + size * self.seconds_per_byte


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Fit the model by weighted least squares with nonnegative parameters.

    Squared errors are divided by the time. Without weights, the largest message alone would decide, and the latency
    would be what remains; with relative errors, the noise of the smallest messages would spoil the bandwidth.

    Args:
        sizes: message sizes in bytes, at least two different ones.
        seconds: the positive time that each message took.

    Raises:
        ValueError: the lengths differ, the sizes are all equal, or a time is not positive and finite.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2 or not all(math.isfinite(t) and t > 0 for t in seconds):
        raise ValueError(
            f"sizes {list(sizes)} and seconds {list(seconds)}: pass the same number of each, at least two different "
            "sizes, and positive seconds"
        )
    points = [(float(size), float(taken)) for size, taken in zip(sizes, seconds, strict=True)]
    found = [line for line in _lines(points) if line.latency >= 0 and line.seconds_per_byte >= 0]
    best = min(found, key=lambda line: sum((line.seconds(size) - taken) ** 2 / taken for size, taken in points))
    errors = [best.seconds(size) / taken - 1 for size, taken in points]
    return AlphaBeta(best.latency, best.seconds_per_byte, math.sqrt(math.fsum(e * e for e in errors) / len(points)))


def _lines(points: Sequence[tuple[float, float]]) -> Iterator[AlphaBeta]:
    """Yield the unconstrained fit and the fits with one parameter fixed at zero; one of them is the optimum."""
    weights = [1 / taken for _, taken in points]
    whole, count = math.fsum(weights), len(points)
    # The weights are 1 / time, so every weighted time is 1.
    size = math.fsum(w * n for w, (n, _) in zip(weights, points, strict=True)) / whole
    spread = math.fsum(w * (n - size) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    slope = math.fsum(w * (n - size) * (t - count / whole) for w, (n, t) in zip(weights, points, strict=True)) / spread
    yield AlphaBeta(count / whole - slope * size, slope)
    yield AlphaBeta(count / whole, 0.0)
    square = math.fsum(w * n * n for w, (n, _) in zip(weights, points, strict=True))
    yield AlphaBeta(0.0, math.fsum(n for n, _ in points) / square)


ALL_HIDDEN = 0.1
"""Share of the message time that counts as fully hidden; the step always waits for the last messages."""


@dataclass(frozen=True, order=True)
class Choice:
    """Indices of candidates: one for each group of parameters, and one for the weights."""

    gradients: tuple[int, ...]
    weights: int = 0


@dataclass(frozen=True)
class WeightCosts:
    """Costs of compressed weights, by candidate.

    Attributes:
        sizes: bytes that a rank sends per step.
        codec_seconds: seconds of encoding and decoding per step.
        overlap: the weights are sent while the next forward pass runs.
    """

    sizes: tuple[float, ...] = (0.0,)
    codec_seconds: tuple[float, ...] = (0.0,)
    overlap: bool = False


@dataclass(frozen=True)
class Measurement:
    """A measurement that all ranks made together after a step. It is the same on every rank.

    Attributes:
        errors: squared error, by candidate and group.
        norms: squared norm of each group.
        sizes: bytes that a rank sends per step, by candidate and group.
        codec_seconds: seconds of encoding and decoding per step, by candidate.
        link: the model of the link.
        waited: seconds for which the step waited for messages.
        step: seconds of a step.
        weights: costs of the weights.
    """

    errors: tuple[tuple[float, ...], ...]
    norms: tuple[float, ...]
    sizes: tuple[tuple[float, ...], ...]
    codec_seconds: tuple[float, ...]
    link: AlphaBeta
    waited: float
    step: float
    weights: WeightCosts = WeightCosts()

    def error(self, gradients: Sequence[int]) -> float:
        """Return the relative error if group g uses candidate `gradients[g]`."""
        whole = sum(self.norms)
        lost = sum(self.errors[candidate][group] for group, candidate in enumerate(gradients))
        return (lost / whole) ** 0.5 if whole else 0.0

    def gradient_bytes(self, gradients: Sequence[int]) -> float:
        return sum(self.sizes[candidate][group] for group, candidate in enumerate(gradients))

    def bytes(self, choice: Choice) -> float:
        """Return the bytes of gradients and weights that a rank sends per step."""
        return self.gradient_bytes(choice.gradients) + self.weights.sizes[choice.weights]

    def seconds(self, choice: Choice, hidden: float) -> float:
        """Return the seconds that `choice` adds to a step, which hides up to `hidden` seconds of messages."""
        hideable, late = self._message_seconds(choice)
        return self._codec(choice) + late + max(0.0, hideable - hidden)

    def step_seconds(self, choice: Choice, now: Choice, hidden: float) -> float:
        """Return the predicted seconds of a step with `choice`, given that it was measured with `now`."""
        return max(0.0, self.step - self.seconds(now, hidden)) + self.seconds(choice, hidden)

    def hidden_seconds(self, now: Choice, before: float) -> float:
        """Return the seconds of messages that a step hides, measured with `now`; `before` is the previous estimate.

        If all messages were hidden, a step can hide at least that many seconds.
        """
        hideable, late = self._message_seconds(now)
        left = max(0.0, self.waited - late)
        if not hideable or left <= ALL_HIDDEN * hideable:
            return max(before, hideable)
        return max(0.0, hideable - left)

    def _message_seconds(self, choice: Choice) -> tuple[float, float]:
        """Return the seconds of the messages that a step can hide, and of those that it waits for."""
        gradients = self.gradient_bytes(choice.gradients) * self.link.seconds_per_byte
        weights = self.weights.sizes[choice.weights] * self.link.seconds_per_byte
        late = 0.0 if self.weights.overlap else weights
        return gradients + weights - late, late

    def _codec(self, choice: Choice) -> float:
        shares = [sum(column) for column in self.sizes]
        gradients = sum(
            self.sizes[gradient][group] / shares[gradient] * self.codec_seconds[gradient]
            for group, gradient in enumerate(choice.gradients)
            if shares[gradient]
        )
        return gradients + self.weights.codec_seconds[choice.weights]
