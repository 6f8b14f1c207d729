"""Linear model of a message's time: a latency plus a time per byte (Hockney's alpha-beta model)."""

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
