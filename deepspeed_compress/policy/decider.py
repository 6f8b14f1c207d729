"""Interface of the deciders of a policy, with the plan of a step and the figures of a finished one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config import GradientsConfig, WeightsConfig, brief


@dataclass(frozen=True)
class StepPlan:
    """The plan of one optimizer step.

    Attributes:
        settings: settings of `gradients`.
        weights: settings of `weights`.
        dense: nothing is compressed, neither gradients nor weights.
        flush: the residuals are sent along with the gradients.
        sync: this step is a full synchronization.
        probe: the step is measured for `Adaptation.choose`.
        changed: the settings of gradients differ from those of the previous step.
        alone: the engine reduces gradients and gathers weights itself, as without this package.
    """

    settings: GradientsConfig
    weights: WeightsConfig
    dense: bool = False
    flush: bool = False
    sync: bool = False
    probe: bool = False
    changed: bool = False
    alone: bool = False

    @property
    def text(self) -> str:
        """Return the settings of gradients in short form."""
        return "none" if self.dense else brief(self.settings)


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


@dataclass(frozen=True)
class Actions:
    """Actions to take after a step: check the residuals for damage, and load the last checkpoint."""

    check_residuals: bool = False
    load_checkpoint: bool = False


class Decider:
    """One reason to change settings between steps. Deciders work in order on the plan of each step.

    Some also observe finished steps. A decider may change settings only by figures that are equal on all ranks. It
    passes its decisions, as events, to the function `record` that its constructor receives.
    """

    def plan(self, step: int, plan: StepPlan) -> StepPlan:
        """Return the plan of optimizer step `step` (0-based), given that of the deciders before this one."""
        raise NotImplementedError

    def saved(self) -> dict[str, Any]:
        """Return entries of the policy's saved state, as plain data for JSON: all that later decisions depend on."""
        return {}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from a policy's saved state, which has no entries of this decider if the run had none."""


def settings_text(gradients: GradientsConfig, weights: WeightsConfig | None) -> str:
    """Return settings of gradients, and of weights if given, in short form: "sign, weights blockwise bits=4"."""
    return brief(gradients) + ("" if weights is None else f", weights {brief(weights)}")
