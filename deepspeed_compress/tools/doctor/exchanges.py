"""Effect of exchanges between islands on the loss."""

import math
import statistics
from dataclasses import dataclass

from deepspeed_compress.tools.doctor.case import SAMPLES, Case


@dataclass(frozen=True)
class Rise:
    """Rise of the loss at exchanges.

    Attributes:
        mean: Mean rise of the loss from the step before an exchange to the step after it.
        before: Median loss before the exchanges.
        exchanges: Number of exchanges considered.
    """

    mean: float
    before: float
    exchanges: int


def after_exchanges(case: Case) -> list[int]:
    """Return the measured steps that follow an exchange. The bytes of the exchange are counted in these steps."""
    return [line["step"] for line in case.run.steps if line.get("bytes_islands")]


def count_exchanges(case: Case) -> int:
    """Return the number of exchanges of this island, estimated if not all steps are measured."""
    every = case.run.section.monitor.every if case.run.section is not None else 1
    return every * len(after_exchanges(case))


def rise_at_exchanges(case: Case) -> Rise | None:
    """Return the rise of the loss at exchanges, or None if there are too few exchanges or the rise is within the noise.

    Only the later half of the exchanges is considered, because early in training every exchange improves the loss.
    """
    losses = dict(case.run.losses)
    pairs = [(losses[step - 1], losses[step]) for step in after_exchanges(case) if {step - 1, step} <= losses.keys()]
    pairs = [(before, after) for before, after in pairs if math.isfinite(after - before)]
    late = pairs[len(pairs) // 2 :]
    if len(late) < SAMPLES:
        return None
    rises = [after - before for before, after in late]
    found = Rise(statistics.fmean(rises), statistics.median(before for before, _ in late), len(rises))
    # The noise of all losses would be too large an estimate, since it includes the fall of the loss after each
    # exchange.
    error = statistics.stdev(rises) / math.sqrt(len(rises))
    least = max(case.limits.rise * found.before, case.limits.sigmas * error)
    return found if found.mean >= least else None
