"""The linear model of a message's time: a latency, and a time for every byte (Hockney's model)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["AlphaBeta", "fit"]


@dataclass(frozen=True)
class AlphaBeta:
    """t(n) = `latency` + n * `seconds_per_byte`. `error`: root mean square of the fit's relative errors."""

    latency: float
    seconds_per_byte: float
    error: float = 0.0

    @property
    def bandwidth(self) -> float:
        """Bytes per second of an endless message; infinite when size costs nothing."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte else float("inf")

    def seconds(self, size: float) -> float:
        """Predicted time of `size` bytes."""
        return self.latency + size * self.seconds_per_byte


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Weighted least squares, neither parameter negative.

    `sizes` in bytes (at least two different ones) and the positive `seconds` that each took; else ValueError. Squares
    of errors are divided by the time, as if it varied byte by byte: unweighted, the largest message alone would decide
    and the latency be what remains; with relative errors, the noise of the smallest would spoil the bandwidth.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2 or not all(math.isfinite(t) and t > 0 for t in seconds):
        raise ValueError(
            f"sizes {list(sizes)} and seconds {list(seconds)}: give as many of each, at least two different sizes, and "
            "positive seconds"
        )
    points = [(float(size), float(taken)) for size, taken in zip(sizes, seconds, strict=True)]
    found = [line for line in _lines(points) if line.latency >= 0 and line.seconds_per_byte >= 0]
    best = min(found, key=lambda line: sum((line.seconds(size) - taken) ** 2 / taken for size, taken in points))
    errors = [best.seconds(size) / taken - 1 for size, taken in points]
    return AlphaBeta(best.latency, best.seconds_per_byte, math.sqrt(math.fsum(e * e for e in errors) / len(points)))


def _lines(points: Sequence[tuple[float, float]]) -> Iterator[AlphaBeta]:
    """Of the problem itself, and of those with one parameter held at zero: one of them is the constrained optimum."""
    weights = [1 / taken for _, taken in points]
    whole, count = math.fsum(weights), len(points)
    # A weighted time is 1 by the choice of the weights.
    size = math.fsum(w * n for w, (n, _) in zip(weights, points, strict=True)) / whole
    spread = math.fsum(w * (n - size) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    slope = math.fsum(w * (n - size) * (t - count / whole) for w, (n, t) in zip(weights, points, strict=True)) / spread
    yield AlphaBeta(count / whole - slope * size, slope)
    yield AlphaBeta(count / whole, 0.0)
    square = math.fsum(w * n * n for w, (n, _) in zip(weights, points, strict=True))
    yield AlphaBeta(0.0, math.fsum(n for n, _ in points) / square)
