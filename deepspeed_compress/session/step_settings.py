"""Settings in force in the running optimizer step, and the reducer that is made of them."""

from deepspeed_compress.collectives.grouped import GroupedReducers, GroupedReductions
from deepspeed_compress.config import CompressConfig, CompressedGradients, WeightsConfig
from deepspeed_compress.config.methods import NoCompression
from deepspeed_compress.policy import Policy, StepPlan


class StepSettings:
    """Settings in force. They change only in `begin`.

    Args:
        config: the section.
        policy: decides at the beginning of every step.
        reductions: the reducers for each choice of gradient settings; None for method "none", which leaves reduction to
            the engine.
    """

    def __init__(self, config: CompressConfig, policy: Policy, reductions: GroupedReductions | None) -> None:
        self.plan = StepPlan(config.gradients, config.weights)
        """Plan of the running step."""
        self._config, self._policy, self._reductions = config, policy, reductions
        self._reducers: GroupedReducers | None = None

    @property
    def reducers(self) -> GroupedReducers:
        """Return the reducers of the running step."""
        assert self._reducers is not None, 'method "none" leaves reduction to the engine, and others begin with a step'
        return self._reducers

    @property
    def weights(self) -> WeightsConfig | None:
        """Return the weight settings of the running step; None if the engine itself gathers weights.

        `NoCompression` if nothing is compressed.
        """
        if self.plan.alone:
            return None
        return NoCompression() if self.plan.dense else self.plan.weights

    def begin(self, step: int) -> None:
        """Put the settings of optimizer step `step` (0-based) in force."""
        self.plan = plan = self._policy.begin(step)
        settings = self._config.gradients if plan.dense else plan.settings
        if self._reductions is not None:
            assert isinstance(settings, CompressedGradients)
            self._reducers = self._reductions.at(settings, step, plan.dense, plan.flush)
