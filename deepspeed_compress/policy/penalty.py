"""Penalties: how many more steps training needs to reach a loss when messages have an error.

The curves come from measurements (docs/results.md, "Adaptive"). Coarse messages cost many steps early in training and
far fewer later. If settings of equal error differ, the curve has the larger number, so a choice is never worse than
predicted.

The error of one message determines the cost of a quantizer or a sparsifier. It does not determine that of weights,
whose next difference contains what the last one left out. Their costs are tabulated by method.
"""

import itertools
import math
from collections.abc import Mapping

from deepspeed_compress.config.places import BlockwiseWeights, SignWeights, WeightsConfig

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
    (x_before, y), (x_next, y_next) = next(pair for pair in itertools.pairwise(curve) if x <= pair[1][0])
    return y + (y_next - y) * (x - x_before) / (x_next - x_before)
