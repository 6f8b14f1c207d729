"""How many more steps training takes to a loss, for what its messages lose.

Read from measurements (docs/measurements.md, "What a candidate is predicted to cost"): early in training coarse
messages cost many steps, later far fewer. Where settings of equal error differ, the larger number stands: what is
chosen by it is not worse than it says.

The error of one message tells what a quantizer or a sparsifier costs. It does not tell it of PowerSGD, whose factors
are warm and whose residual comes back for many steps, nor of weights, whose next difference has what the last one left
out: these costs are known by method alone.
"""

import itertools
import math
from collections.abc import Mapping
from types import MappingProxyType

from deepspeed_compress.config.places import BlockwiseWeights, SignWeights, WeightsConfig

__all__ = ["low_rank_error", "penalty", "weights_penalty"]

Curve = tuple[tuple[float, float], ...]
"""(relative error, steps for each step of uncompressed training), rising."""

CURVES: Mapping[int, Curve] = MappingProxyType(
    {
        90: ((0.0, 1.0), (0.01, 1.0), (0.15, 1.04), (0.38, 1.5), (0.65, 1.8), (1.0, 2.0)),
        500: ((0.0, 1.0), (0.15, 1.0), (0.38, 1.08), (0.65, 1.4), (1.0, 1.5)),
    }
)
"""Of gradients, by the optimizer step that training has come to."""
LOW_RANK: Curve = ((0.0, 0.99), (1.0, 0.7), (2.0, 0.5), (3.0, 0.27), (4.0, 0.15))
"""(log2 of the rank of PowerSGD, the error of messages that cost as many steps). Ranks 1 to 8 are measured; of 16 it is
what follows from twice the rank losing half. Rank 1 costs more steps than any error of `CURVES`."""
WEIGHTS: Mapping[int, Curve] = MappingProxyType(
    {
        80: ((0.0, 1.0), (0.1, 1.0), (0.38, 1.17), (0.52, 1.4), (1.0, 2.0)),
        300: ((0.0, 1.0), (0.1, 1.0), (0.38, 1.17), (0.52, 1.22), (1.0, 2.0)),
        500: ((0.0, 1.0), (0.1, 1.0), (0.38, 1.05), (0.52, 1.1), (1.0, 2.0)),
    }
)
"""Of weights that travel as differences, by the relative error of a difference of one step of Adam."""
UPDATES: Mapping[tuple[str, int], float] = MappingProxyType(
    {
        ("blockwise", 8): 0.01,
        ("blockwise", 4): 0.1,
        ("blockwise", 3): 0.2,
        ("blockwise", 2): 0.36,
        ("sign", 3): 0.38,
        ("sign", 2): 0.52,
    }
)
"""That error, by method and bits or levels."""


def penalty(error: float, step: int) -> float:
    """Steps that training needs for each step of uncompressed training, at least 1.

    Args:
        error: ||x - C(x)|| / ||x|| of the messages of gradients, without error feedback, which is taken to be on; of
            PowerSGD `low_rank_error`.
        step: optimizer steps done. Between those of `CURVES` its logarithm counts; beyond, the nearest curve.

    Returns:
        Never less for a larger `error`. Infinity from 1 on, where error feedback does not catch up, and for NaN.
    """
    return _between(CURVES, error, step)


def low_rank_error(rank: int) -> float:
    """The error of messages that cost as many steps as PowerSGD of `rank` with error feedback."""
    return _at(LOW_RANK, min(math.log2(rank), LOW_RANK[-1][0]))


def weights_penalty(weights: WeightsConfig, step: int) -> float:
    """The same for `weights` that travel as differences: 1 for uncompressed ones; `topk` is no candidate."""
    if weights.method == "none":
        return 1.0
    assert isinstance(weights, BlockwiseWeights | SignWeights)
    levels = weights.bits if isinstance(weights, BlockwiseWeights) else weights.levels
    return _between(WEIGHTS, UPDATES[weights.method, levels], step)


def _between(curves: Mapping[int, Curve], error: float, step: int) -> float:
    if not error < 1:
        return math.inf
    logs = [(math.log(at), _at(curve, error)) for at, curve in curves.items()]
    return _at(tuple(logs), min(max(math.log(max(step, 1)), logs[0][0]), logs[-1][0]))


def _at(curve: Curve, x: float) -> float:
    """Linear between the points."""
    (x_before, y), (x_next, y_next) = next(pair for pair in itertools.pairwise(curve) if x <= pair[1][0])
    return y + (y_next - y) * (x - x_before) / (x_next - x_before)
