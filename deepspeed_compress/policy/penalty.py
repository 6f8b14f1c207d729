"""How many more steps training takes to a loss, for what its messages lose.

Read from two measurements (docs/measurements.md, "Time to a loss"; docs/methods.md, "Measured") of settings whose
relative errors are known: early in training coarse messages cost many steps, later far fewer. Where settings of equal
error differ, the larger number stands: what is chosen by it is not worse than it says.
"""

import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["penalty"]

Curve = tuple[tuple[float, float], ...]
"""(relative error, steps for each step of uncompressed training), rising."""

CURVES: Mapping[int, Curve] = MappingProxyType(
    {
        90: ((0.0, 1.0), (0.01, 1.0), (0.15, 1.04), (0.38, 1.5), (0.65, 1.8), (1.0, 2.0)),
        500: ((0.0, 1.0), (0.15, 1.0), (0.38, 1.08), (0.65, 1.4), (1.0, 1.5)),
    }
)
"""By the optimizer step that training has come to."""


def penalty(error: float, step: int) -> float:
    """Steps that training needs for each step of uncompressed training, at least 1.

    Args:
        error: ||x - C(x)|| / ||x|| of the messages, without error feedback, which is taken to be on.
        step: optimizer steps done. Between those of `CURVES` its logarithm counts; beyond, the nearest curve.

    Returns:
        Never less for a larger `error`. Infinity from 1 on, where error feedback does not catch up, and for NaN.
    """
    if not error < 1:
        return math.inf
    (early, first), (late, last) = CURVES.items()
    progress = math.log(min(max(step, early), late) / early) / math.log(late / early)
    return (1 - progress) * _at(first, error) + progress * _at(last, error)


def _at(curve: Curve, error: float) -> float:
    """Linear between the points."""
    (x, y), (x_next, y_next) = next(pair for pair in itertools.pairwise(curve) if error <= pair[1][0])
    return y + (y_next - y) * (error - x) / (x_next - x)
