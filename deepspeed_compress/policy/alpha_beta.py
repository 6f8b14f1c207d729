"""The linear model of a message's time: a latency, and a time for every byte (Hockney's model)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["AlphaBeta", "fit"]

Floats = NDArray[np.float64]


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
    x, y = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1 or len(np.unique(x)) < 2 or not (np.isfinite(y) & (y > 0)).all():
        raise ValueError(
            f"sizes {list(sizes)} and seconds {list(seconds)}: give as many of each, at least two different sizes, and "
            "positive seconds"
        )
    columns = np.stack([np.ones_like(x), x], axis=1)
    weights = 1 / np.sqrt(y)
    weighted, target = columns * weights[:, None], y * weights
    candidates = [solution for solution in _solutions(weighted, target) if (solution >= 0).all()]
    best = min(candidates, key=lambda solution: _square(weighted @ solution - target))
    error = np.sqrt(_square(columns @ best / y - 1) / len(y))
    return AlphaBeta(float(best[0]), float(best[1]), float(error))


def _solutions(columns: Floats, target: Floats) -> list[Floats]:
    """Of the problem itself, and of those with one parameter held at zero: one of them is the constrained optimum."""
    both = np.linalg.lstsq(columns, target, rcond=None)[0]
    alone = columns.T @ target / np.square(columns).sum(axis=0)
    return [both, np.array([alone[0], 0.0]), np.array([0.0, alone[1]])]


def _square(errors: Floats) -> float:
    return float(np.square(errors).sum())
