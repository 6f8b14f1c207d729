"""The decider of `guard`: skips steps, softens compression after an anomaly, and rolls back if the loss falls behind.

All ranks observe the same figures (`anomalies`), so their guards are in the same state. DeepSpeed skips a step that
`Guard.skips` rejects, because it gets the norm infinity (`backends/deepspeed/norms.py`).
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from deepspeed_compress.config import CompressConfig, GradientsConfig, brief, patched, settings_of, written
from deepspeed_compress.monitor import Event
from deepspeed_compress.policy.anomalies import MAX_SKIPS, Anomaly, GuardState, find_anomalies, learn
from deepspeed_compress.policy.decider import Actions, Decider, Observation, StepPlan


class Guard(Decider):
    """Softens what the other deciders choose.

    Until it has seen a full window of applied steps, it reacts only to non-finite figures. A gradient norm beyond
    `exploding` softens the compression if it persists. Only a norm beyond the square of that factor, which no batch
    explains and clipping does not repair, prevents a step from being applied.
    """

    def __init__(self, config: CompressConfig, record: Callable[[Event], None]) -> None:
        assert config.guard is not None
        self._config, self._section, self._record = config.guard, _section(config), record
        self._acts = not config.guard.dry_run
        """True if decisions take effect."""
        self._state = GuardState()
        self._pinned: GradientsConfig | None = None
        """Settings that replace the chosen ones after a rollback."""
        self._good: GradientsConfig | None = None
        """Settings that were in force when the smoothed loss was best."""

    def skips(self, norm: float) -> bool:
        """Return True if a step with this gradient norm (see `Observation`) must not be applied."""
        if not self._acts:
            return False
        if not math.isfinite(norm):
            return True
        can_skip = self._config.skip_steps and self._state.skipped < MAX_SKIPS
        usual = self._state.usual_norm(self._config.window)
        return can_skip and usual is not None and norm > self._config.exploding**2 * usual > 0

    def plan(self, step: int, plan: StepPlan) -> StepPlan:
        every = self._config.full_sync_every if self._acts else 0
        settings = _soften(self.pinned(plan).settings, self._state.level if self._acts else 0)
        return replace(plan, settings=settings, sync=every > 0 and (step + 1) % every == 0)

    def pinned(self, plan: StepPlan) -> StepPlan:
        """Return `plan` with the settings of a rollback, if there was one and the step is not left to the engine."""
        return plan if self._pinned is None or plan.alone else replace(plan, settings=self._pinned)

    def forget_residuals(self) -> None:
        """Forget residual norms, because those of other settings are not comparable."""
        self._state = replace(self._state, residuals=())

    def wants_residuals(self, step: int, plan: StepPlan) -> bool:
        """Return True if the observation of the finished `step` (1-based) needs the residual norm."""
        return step % self._config.residual_every == 0 and not plan.dense

    def observe(self, seen: Observation, plan: StepPlan, upcoming: StepPlan) -> Actions:
        """Learn from a finished step and return the actions to take.

        Args:
            seen: figures of the step.
            plan: its plan.
            upcoming: plan of the next step, as far as the deciders before this one have made it.
        """
        if plan.sync and seen.applied:
            self._event(seen.step, "full_sync", "residuals and exact weights were sent", {}, plan.settings)
        before, chosen = self._state, self.pinned(upcoming).settings
        state, anomalies = find_anomalies(self._config, before, seen)
        state, behind = learn(self._config, state, seen)
        self._state = self._after(state, len(ladder(chosen)) - 1, bool(anomalies), behind)
        former, latter = (_soften(chosen, state.level) for state in (before, self._state))
        for anomaly in anomalies:
            self._event(seen.step, "anomaly", anomaly.reason, anomaly.evidence, former, latter)
        if not anomalies and self._state.level < before.level:
            reason = f"{self._config.cooldown_steps} steps without an anomaly"
            self._event(seen.step, "return", reason, {}, former, latter)
        if behind is not None:
            return Actions(bool(anomalies), self._roll_back(seen.step, behind, plan.settings, chosen))
        if self._state.smoothed is not None and self._state.smoothed == self._state.best:
            self._good = plan.settings
        return Actions(bool(anomalies))

    def _after(self, state: GuardState, top: int, is_anomaly: bool, behind: Anomaly | None) -> GuardState:
        """Return `state` with the level after a step. `top` is the number of ladder levels above 0."""
        if is_anomaly:
            levels = {"disable": top, "soften": min(state.level + 1, top), "report": state.level}
            return replace(state, level=max(levels[self._config.on_anomaly], state.floor), quiet=0)
        if state.level == state.floor or behind is not None:
            return state
        returns = state.quiet + 1 >= self._config.cooldown_steps
        return replace(state, level=state.level - returns, quiet=0 if returns else state.quiet + 1)

    def _roll_back(self, step: int, why: Anomaly, now: GradientsConfig, chosen: GradientsConfig) -> bool:
        """Return to the settings of the best loss, or to softer ones; return True if a checkpoint must be loaded.

        A checkpoint is loaded if nothing is compressed, since no softer settings remain.
        """
        if now.method == "none":
            loads = self._config.rollback is not None and self._config.rollback.checkpoint
            if loads:
                self._event(step, "checkpoint_rollback", why.reason, why.evidence, now)
            return loads and self._acts
        level, good = self._state.level + 1, self._good
        can_pin = good is not None and good != now
        after = good if good is not None and can_pin else _soften(chosen, level)
        self._event(step, "rollback", why.reason, why.evidence, now, after)
        if self._acts and can_pin:
            self._pinned = good
        elif self._acts:
            self._state = replace(self._state, level=level, floor=level)
        return False

    def damaged(self, step: int, plan: StepPlan, residual_norm: float) -> bool:
        """Return True if residuals of `residual_norm`, seen after an anomaly in `step`, must be cleared.

        Compression cannot be the cause of such residuals.
        """
        usual = self._config.residual_growth * self._state.largest_residual
        if math.isfinite(residual_norm) and not residual_norm > usual > 0:
            return False
        evidence = {"residual_norm": residual_norm, "largest": max(self._state.residuals, default=0.0)}
        self._event(step, "residuals_cleared", "the residuals of previous steps are damaged", evidence, plan.settings)
        return self._acts

    def _event(
        self,
        step: int,
        kind: str,
        reason: str,
        evidence: Mapping[str, float],
        before: GradientsConfig,
        after: GradientsConfig | None = None,
    ) -> None:
        former, latter = brief(before), brief(after or before)
        self._record(Event(step, kind, reason, dict(evidence), former, latter, dry_run=not self._acts))

    def saved(self) -> dict[str, Any]:
        kept = zip(_KEPT, (self._pinned, self._good), strict=True)
        settings = {name: None if value is None else written(value) for name, value in kept}
        return {"guard": asdict(self._state), "of": self._section, **settings}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the saved state. If the section has changed since, decisions about the old settings end."""
        if "guard" not in saved:
            return
        self._state = GuardState.loaded(saved["guard"])
        is_same = saved["of"] == self._section
        if not is_same:
            self._state = replace(self._state, level=0, quiet=0, residuals=())
        if is_same and self._acts and self._config.rollback is not None:
            self._pinned, self._good = (None if saved[key] is None else settings_of(saved[key]) for key in _KEPT)
        else:
            self._pinned, self._good, self._state = None, None, replace(self._state, floor=0)


_KEPT = ("pinned", "good")


def _section(config: CompressConfig) -> dict[str, Any]:
    """Return the part of the section that the guard's decisions refer to, as plain data for JSON."""
    section: dict[str, Any] = config.model_dump(mode="json", include={"gradients", "schedule", "adaptive"})
    for key in ("candidates", "weights"):
        if section["adaptive"] and section["adaptive"][key]:
            # The order of candidates has no meaning.
            section["adaptive"][key].sort(key=partial(json.dumps, sort_keys=True))
    return section


def ladder(gradients: GradientsConfig) -> tuple[GradientsConfig, ...]:
    """Return `gradients`, followed by settings with less and less error; the last one is method "none"."""
    rungs = [gradients]
    while rungs[-1].method != "none":
        rungs.append(patched(rungs[-1], rungs[-1].softer() or {"method": "none"}))
    return tuple(rungs)


def _soften(chosen: GradientsConfig, level: int) -> GradientsConfig:
    rungs = ladder(chosen) if level else (chosen,)
    return rungs[min(level, len(rungs) - 1)]
