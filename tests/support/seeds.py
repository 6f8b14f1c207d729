"""Comparisons of two kinds of training over several seeds.

The loss of one seed differs between processors, because rounding errors grow while a model trains. What holds on all of
them is a statement about the mean over seeds, with its standard error.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SEEDS = range(5)
TEXT = Path(__file__).parents[2] / "LICENSE"
"""Text to train on that stays the same when code changes."""
STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class Excess:
    """Relative excess of a loss over that of a baseline, as a mean over seeds with its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, losses: Sequence[float], baseline: Sequence[float]) -> "Excess":
        """Compare seed by seed, so that what both owe to a seed cancels out."""
        found = [loss / other - 1 for loss, other in zip(losses, baseline, strict=True)]
        return cls(statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found)))

    def is_below(self, bound: float) -> bool:
        """Return True if the mean is below `bound` by more than two standard errors."""
        return self.mean + STANDARD_ERRORS * self.error < bound

    def is_within(self, bound: float) -> bool:
        """Return True if the mean is nearer to zero than `bound` by more than two standard errors."""
        return abs(self.mean) + STANDARD_ERRORS * self.error < bound
