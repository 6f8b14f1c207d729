"""What exchanges between islands do to the loss."""

import math
import statistics
from dataclasses import dataclass

from deepspeed_compress.tools.doctor.case import SAMPLES, Case

__all__ = ["Rise", "after_exchanges", "rise_at_exchanges"]


@dataclass(frozen=True)
class Rise:
    """`mean`: of the loss, from the step before an exchange to the one after it. `before`: its median before them."""

    mean: float
    before: float
    exchanges: int


def after_exchanges(case: Case) -> list[int]:
    """Measured steps that follow an exchange, with which its bytes are counted."""
    return [line["step"] for line in case.run.steps if line.get("bytes_islands")]


def rise_at_exchanges(case: Case) -> Rise | None:
    """In the later half of the run, since at the start all gain; None where no rise beyond noise is known."""
    losses = dict(case.run.losses)
    pairs = [(losses[step - 1], losses[step]) for step in after_exchanges(case) if {step - 1, step} <= losses.keys()]
    pairs = [(before, after) for before, after in pairs if math.isfinite(after - before)]
    late = pairs[len(pairs) // 2 :]
    if len(late) < SAMPLES:
        return None
    rises = [after - before for before, after in late]
    found = Rise(statistics.fmean(rises), statistics.median(before for before, _ in late), len(rises))
    # Not the noise of all losses, which would count how they fall again after an exchange.
    error = statistics.stdev(rises) / math.sqrt(len(rises))
    least = max(case.limits.rise * found.before, case.limits.sigmas * error)
    return found if found.mean >= least else None
