"""The figures of a finished optimizer step that all ranks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Observation:
    """Figures of a finished step that are equal on all ranks; None if they were not taken.

    Attributes:
        step: the finished step, 1-based.
        applied: the optimizer did not skip the step.
        grad_norm: L2 norm of the mean gradient before clipping, without the loss scale; inf if it is not finite.
        loss: mean loss over the ranks in the previous step, because means arrive while the next step runs.
        residual_norm: largest residual norm of all ranks.
        step_ms: mean step time over the ranks in the previous step, in milliseconds.
    """

    step: int
    applied: bool = True
    grad_norm: float | None = None
    loss: float | None = None
    residual_norm: float | None = None
    step_ms: float | None = None
