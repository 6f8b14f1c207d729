"""What all ranks know of a finished optimizer step."""

from dataclasses import dataclass

__all__ = ["Observation"]


@dataclass(frozen=True)
class Observation:
    """Figures that are equal on all ranks; None where they were not taken.

    `step`: the finished one, from 1. `applied`: the optimizer did not skip it. `grad_norm`: L2 norm of the mean
    gradient before clipping, without loss scale; inf where it is not finite. `loss`: mean over the ranks, of the step
    before this one, since means arrive while the next step runs; so is `step_ms`, the mean of the time that ranks took.
    `residual_norm`: the largest of all ranks.
    """

    step: int
    applied: bool = True
    grad_norm: float | None = None
    loss: float | None = None
    residual_norm: float | None = None
    step_ms: float | None = None
