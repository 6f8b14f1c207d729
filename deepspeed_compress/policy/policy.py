"""The policy: deciders that work in order on the plan of each step, and the residuals that a change of settings leaves.

```text
schedule -> adaptation or auto -> guard -> settings in force
```
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deepspeed_compress.config import CompressConfig, GradientsConfig, settings_of, written
from deepspeed_compress.monitor import Event
from deepspeed_compress.policy.adaptation import Adaptation
from deepspeed_compress.policy.auto import AutoChoice
from deepspeed_compress.policy.decider import Actions, Decider, Observation, StepPlan, settings_text
from deepspeed_compress.policy.guard import Guard
from deepspeed_compress.policy.schedule import SettingsSchedule


class Policy:
    """Decides between steps. Every rank has a policy and gives it the same observations.

    Args:
        config: the section.
        total: optimizer steps of training; needed if the schedule has phases.
        record: called with every event.
        differences: True if weights are sent as differences, so that their settings may be chosen.
    """

    def __init__(
        self, config: CompressConfig, total: int | None, record: Callable[[Event], None], differences: bool = False
    ) -> None:
        self._config = config
        self.adaptation = None if config.adaptive is None else Adaptation(config, record, differences)
        self.auto = None if config.auto is None else AutoChoice(config, record)
        self.guard = None if config.guard is None else Guard(config, record)
        choosers: list[Decider | None] = [SettingsSchedule(config, total), self.adaptation, self.auto]
        self._choosers = [chooser for chooser in choosers if chooser is not None]
        self._deciders = self._choosers if self.guard is None else [*self._choosers, self.guard]
        self._record = record
        self._plan = self._stand_in(self._chosen(0).settings)
        self._step = 0
        """Step for which `_plan` was computed."""
        self._was_dense = self._plan.dense
        """True if no residuals remained after the step before `_step`, because nothing was compressed."""

    @property
    def observes(self) -> bool:
        """Return True if observations can change the settings."""
        return self.guard is not None or self.adaptation is not None

    def begin(self, step: int) -> StepPlan:
        """Return the plan of optimizer step `step` (0-based), which is about to begin."""
        plan, last = self._chosen(step), self._plan
        self._record_schedule(step, plan)
        if self.guard is not None:
            plan = self.guard.plan(step, plan)
        if step != self._step:
            # An uncompressed step of a comparison keeps the residuals of the compressed steps around it.
            self._step, self._was_dense = step, last.dense and (self._was_dense or last.flush)
        changed = plan.settings != last.settings
        if changed and self.guard is not None:
            self.guard.forget_residuals()
        off = self._is_off(step, plan)
        sync = plan.sync and not off
        # Flush the residuals when compression stops; they would be stale when it resumes.
        flush = sync or (off and not self._was_dense and not (self.auto is not None and self.auto.measures))
        # Residuals that remain are sent by a step of ours.
        alone = plan.alone and not flush
        self._plan = replace(plan, dense=off or sync, flush=flush, sync=sync, changed=changed, alone=alone)
        return self._plan

    def observe(self, seen: Observation) -> Actions:
        """Let all deciders learn from a finished step, and return what to do about it."""
        if self._plan.flush and not seen.applied:
            # The residuals are still there, as after a compressed step.
            self._plan = replace(self._plan, dense=False)
        if self.adaptation is not None:
            self.adaptation.observe(seen)
        return Actions() if self.guard is None else self.guard.observe(seen, self._plan, self._chosen(seen.step))

    def saved(self) -> dict[str, Any]:
        """Return everything that later decisions depend on, as plain data for JSON."""
        entries = {key: value for decider in self._deciders for key, value in decider.saved().items()}
        return {**entries, "settings": written(self._plan.settings), "step": self._step, "was_dense": self._was_dense}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state that `saved` returned; call `begin` afterwards."""
        for decider in self._deciders:
            decider.load(saved)
        self._plan = self._stand_in(settings_of(saved["settings"]))
        self._step, self._was_dense = saved["step"], saved["was_dense"]

    def _record_schedule(self, step: int, after: StepPlan) -> None:
        """Record that `step` begins a part of the schedule. With `adaptive`, only measurements are recorded."""
        before = self._chosen(max(step - 1, 0))
        if self.guard is not None:
            before, after = self.guard.pinned(before), self.guard.pinned(after)
        if self.adaptation is None and (before.settings, before.weights) != (after.settings, after.weights):
            weights = (None, None) if before.weights == after.weights else (before.weights, after.weights)
            former, latter = map(settings_text, (before.settings, after.settings), weights)
            self._record(Event(step, "schedule", "the next part of the schedule begins", {}, former, latter))

    def _chosen(self, step: int) -> StepPlan:
        """Return the plan of `step` before the guard changes it."""
        plan = StepPlan(self._config.gradients, self._config.weights)
        for chooser in self._choosers:
            plan = chooser.plan(step, plan)
        return plan

    def _stand_in(self, settings: GradientsConfig) -> StepPlan:
        """Return a plan that stands in until `begin` computes one."""
        return StepPlan(settings, self._chosen(0).weights, dense=settings.method == "none")

    def _is_off(self, step: int, plan: StepPlan) -> bool:
        """Return True if nothing is compressed in `step`, apart from full synchronizations.

        With method "none" for gradients, weights may still be compressed, except during the warm-up.
        """
        if self._config.gradients.method == "none":
            return step < self._config.schedule.warmup_steps
        return plan.settings.method == "none"
