"""Additional tokens that a run needs: critical batch size, and the cost of compression and islands in loss.

A gap in loss becomes a share of additional tokens by the slope of the loss curve of 2203.15556 (Chinchilla, approach
3), at the run's own sizes: at 20 tokens per parameter, 0.1 % of the loss are about 2.5 % of the tokens.
"""

import math
from collections.abc import Iterator, Mapping

from deepspeed_compress.planner.layout import Layout

GRADIENT_GAPS: Mapping[int, float] = {0: 0.0, 8: 0.0, 4: 0.0004, 3: 0.0035}
"""Relative increase of the loss by bits of gradients (docs/methods.md, "Measured": at most 10.5M parameters)."""
DIFFERENCE_GAPS: Mapping[int, float] = {0: 0.0, 8: 0.0, 4: 0.0}
"""The same for updated weights, whose differences are sent (ZeRO 1 and 2)."""
WEIGHT_GAPS: Mapping[int, float] = {0: 0.0, 8: 0.0, 4: 0.0043}
"""The same for gathered weights, which are rounded (ZeRO 3; docs/results.md, "Loss")."""
DILOCO: Mapping[int, tuple[float, float]] = {
    1: (18.129, -0.0953),
    2: (18.768, -0.0969),
    4: (19.762, -0.0992),
    8: (21.051, -0.1018),
}
"""Factor and exponent of loss = factor x parameters ^ exponent, by islands (2503.09799, exchanges every 30 steps)."""
ISLANDS_LOST = "2 to 7 %"
"""Increase of the loss by islands that exchange every 30 steps in our own runs (docs/results.md, "Islands")."""
DILOCO_RANGE = (35e6, 10e9)
"""Parameters for which that law was measured or checked."""
MEASURED = 10.5e6
"""Parameters of the largest model whose gap by compression was measured here."""


def extra_tokens(gap: float, parameters: float, tokens: float) -> float:
    """Return the share of additional tokens that makes up for a relative increase `gap` of the loss."""
    of_size, of_data = 406.4 / parameters**0.34, 410.7 / tokens**0.28
    return math.expm1(gap * (1.69 + of_size + of_data) / (0.28 * of_data))


def loss_gap(layout: Layout, parameters: float) -> float:
    """Return the relative increase of the loss that compression and islands cause."""
    weights = (WEIGHT_GAPS if layout.zero == 3 else DIFFERENCE_GAPS)[layout.weight_bits]
    return GRADIENT_GAPS[layout.gradient_bits] + weights + island_gap(layout.islands, parameters)


def island_gap(islands: int, parameters: float) -> float:
    """Return the relative increase of the loss by islands, at least 0."""
    (factor, exponent), (alone, decay) = DILOCO[islands], DILOCO[1]
    ratio = factor / alone * math.pow(parameters, exponent - decay)
    return max(0.0, ratio - 1)


def critical_batch(tokens: float) -> float:
    """Return the tokens of a step beyond which larger batches need many more tokens (2505.13738)."""
    return float(2048 * 0.0471 * tokens**0.462)


def outside(layout: Layout, parameters: float) -> Iterator[str]:
    """Yield what the laws of `layout` have not been measured for."""
    if (layout.gradient_bits or layout.weight_bits) and parameters > MEASURED:
        yield f"loss with compression: measured up to {MEASURED / 1e6:g}M parameters"
    if layout.islands > 1 and not DILOCO_RANGE[0] <= parameters <= DILOCO_RANGE[1]:
        yield "loss with islands: the law holds from 35M to 10B parameters"
