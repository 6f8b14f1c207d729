"""The settings of the next step: the schedule or adaptive choice, softened by the guard. Decisions become events."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepspeed_compress.config import CompressConfig, GradientsConfig, WeightsConfig, brief, settings_of, written
from deepspeed_compress.config.places import NoneGradients
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor import Event
from deepspeed_compress.policy.adaptation import Adaptation
from deepspeed_compress.policy.adaptive import AllowedChoices
from deepspeed_compress.policy.auto import AutoChoice
from deepspeed_compress.policy.guard import Anomaly, Guard, GuardState
from deepspeed_compress.policy.ladder import ladder
from deepspeed_compress.policy.measurement import Measurement
from deepspeed_compress.policy.observation import Observation
from deepspeed_compress.policy.schedule import SettingsSchedule

_NOT_FROM_GUARD = frozenset({"schedule", "adapt", "auto"})
"""Kinds of events that take effect even if the guard is in dry-run mode."""


@dataclass(frozen=True)
class StepPlan:
    """The plan of one optimizer step.

    Attributes:
        settings: settings of `gradients`.
        weights: settings of `weights`.
        dense: nothing is compressed, neither gradients nor weights.
        flush: the residuals are sent along with the gradients.
        sync: this step is a full synchronization.
        probe: the step is measured for `Policy.adapt`.
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
class Actions:
    """Actions to take after a step: check the residuals for damage, and load the last checkpoint."""

    check_residuals: bool = False
    load_checkpoint: bool = False


class Policy:
    """Decides between steps. Every rank has a policy and gives it the same observations.

    Args:
        config: the section.
        total: optimizer steps of training; needed if the schedule has phases.
        record: called with every event.
        available: the choices that the engine allows, if the section is adaptive.
    """

    def __init__(
        self,
        config: CompressConfig,
        total: int | None,
        record: Callable[[Event], None],
        available: AllowedChoices = AllowedChoices(),  # noqa: B008  (frozen)
    ) -> None:
        self._config = config
        self._guard = None if config.guard is None else Guard(config.guard)
        self._scheduled = SettingsSchedule(config, total)
        self.adaptation = None if config.adaptive is None else Adaptation(config, available)
        self.auto = None if config.auto is None else AutoChoice(config.auto)
        self._record = record
        self._state = GuardState()
        self._pinned: GradientsConfig | None = None
        """Settings that replace the schedule after a rollback."""
        self._good: GradientsConfig | None = None
        """Settings that were in force when the smoothed loss was best."""
        self._plan = self._loaded(self._chosen(0))
        self._step = 0
        """Step for which `_plan` was computed."""
        self._was_dense = self._plan.dense
        """True if no residuals remained after the step before `_step`, because nothing was compressed."""

    @property
    def guards(self) -> bool:
        """Return True if gradient norms and residuals are watched."""
        return self._guard is not None

    @property
    def observes(self) -> bool:
        """Return True if observations can change the settings."""
        return self._guard is not None or self.adaptation is not None

    def begin(self, step: int) -> StepPlan:
        """Return the plan of optimizer step `step` (0-based), which is about to begin."""
        chosen, before = self._chosen(step), self._chosen(max(step - 1, 0))
        if self.adaptation is None and self.auto is None:
            self._record_schedule(step, before, chosen)
        if step != self._step:
            # An uncompressed step of a comparison keeps the residuals of the compressed steps around it.
            self._step, self._was_dense = step, self._plan.dense and (self._was_dense or self._plan.flush)
        settings = _rung(chosen, self._state.level if self._guard_acts else 0)
        changed = settings != self._plan.settings
        if changed:
            # Residual norms of other settings are not comparable.
            self._state = replace(self._state, residuals=())
        # With method "none" for gradients, weights may still be compressed, except during the warm-up.
        weights_alone = self._config.gradients.method == "none"
        off = step < self._config.schedule.warmup_steps if weights_alone else settings.method == "none"
        # Flush the residuals when compression stops; they would be stale when it resumes.
        compares = self.auto is not None and self.auto.measures
        stops = off and not self._was_dense and not compares
        sync = not off and self._is_sync(step)
        probe = self.adaptation is not None and step > self._config.schedule.warmup_steps and self.adaptation.due(step)
        dense, flush = off or sync, stops or sync
        # Residuals that remain are sent by a step of ours.
        alone = self.auto is not None and self.auto.alone and not flush
        self._plan = StepPlan(settings, self._weights(step), dense, flush, sync, probe, changed, alone)
        return self._plan

    def choose(self, step: int, figures: Sequence[float]) -> None:
        """Compare steps, or compare them again, after the finished `step`; see `AutoChoice.close`.

        `figures` are the largest of all ranks of `AutoChoice.figures`.
        """
        assert self.auto is not None
        if figures[-1]:
            self.auto.stop()
            now, reason = self._plan.text, "other code on some rank prevents a change, so the run continues as it is"
            self._emit(step, "auto", reason, {}, now, now)
            return
        if not self.auto.measures:
            self._check_times(step, figures)
            return
        verdict = self.auto.close(figures)
        if verdict is not None:
            after = brief(self._config.gradients) if verdict.compresses else "none"
            self._emit(step, "auto", verdict.reason, verdict.evidence, brief(self._config.gradients), after)

    def _check_times(self, step: int, figures: Sequence[float]) -> None:
        """Compare steps again if their times have changed since the choice of `auto`."""
        assert self.auto is not None
        changed = self.auto.check(figures)
        if changed is not None:
            before, now = changed
            reason = f"steps take {now:.0f} ms, and took {before:.0f} ms at the last comparison, so it is repeated"
            self._emit(step, "auto", reason, {"before_ms": before, "now_ms": now}, self._plan.text, self._plan.text)

    def adapt(self, step: int, seen: Measurement) -> None:
        """Choose again after the finished `step`, which was a probe."""
        assert self.adaptation is not None
        before, after, evidence = self.adaptation.choose(step, seen)
        if before != after:
            reason = "measurements predict a shorter time to a loss"
            self._emit(step, "adapt", reason, evidence, before.text, after.text)

    def skips(self, norm: float) -> bool:
        """Return True if a step with this gradient norm (see `Observation`) must not be applied."""
        return self._guard is not None and self._guard_acts and self._guard.skips(self._state, norm)

    def wants_residuals(self, step: int) -> bool:
        """Return True if the observation of the finished `step` (1-based) needs the residual norm."""
        is_due = self._guard is not None and step % self._guard.config.residual_every == 0
        return is_due and not self._plan.dense

    def observe(self, seen: Observation) -> Actions:
        """Update the state from a finished step, and return what to do about it."""
        if self._plan.flush and not seen.applied:
            # The residuals are still there, as after a compressed step.
            self._plan = replace(self._plan, dense=False)
        elif self._plan.sync:
            self._event(seen.step, "full_sync", "residuals and exact weights were sent", {})
        if self.adaptation is not None:
            self.adaptation.observe(seen)
        if self._guard is None:
            return Actions()
        chosen, before = self._chosen(seen.step), self._state
        self._state, verdict = self._guard.observe(before, seen, len(ladder(chosen)) - 1)
        former, latter = (_rung(chosen, state.level) for state in (before, self._state))
        for anomaly in verdict.anomalies:
            self._event(seen.step, "anomaly", anomaly.reason, anomaly.evidence, former, latter)
        if verdict.returned:
            reason = f"{self._guard.config.cooldown_steps} steps without an anomaly"
            self._event(seen.step, "return", reason, {}, former, latter)
        if self._state.smoothed is not None and self._state.smoothed == self._state.best and verdict.behind is None:
            self._good = self._plan.settings
        load = verdict.behind is not None and self._roll_back(seen.step, verdict.behind, chosen)
        return Actions(check_residuals=bool(verdict.anomalies), load_checkpoint=load)

    def _roll_back(self, step: int, why: Anomaly, chosen: GradientsConfig) -> bool:
        """Return to the settings of the best loss, or to softer ones; return True if a checkpoint must be loaded.

        A checkpoint is loaded if nothing is compressed, since no softer settings remain.
        """
        now, level = self._plan.settings, self._state.level + 1
        if now.method == "none":
            return self._load(step, why)
        can_pin = self._good is not None and self._good != now
        after = self._good if can_pin else _rung(chosen, level)
        self._event(step, "rollback", why.reason, why.evidence, now, after)
        if self._guard_acts and can_pin:
            self._pinned = self._good
        elif self._guard_acts:
            self._state = replace(self._state, level=level, floor=level)
        return False

    def _load(self, step: int, why: Anomaly) -> bool:
        rollback = self._config.guard.rollback if self._config.guard is not None else None
        if rollback is None or not rollback.checkpoint:
            return False
        self._event(step, "checkpoint_rollback", why.reason, why.evidence)
        return self._guard_acts

    def damaged(self, step: int, residual_norm: float) -> bool:
        """Return True if residuals of `residual_norm`, seen after an anomaly in step `step`, must be cleared."""
        if self._guard is None or not self._guard.damaged(self._state, residual_norm):
            return False
        evidence = {"residual_norm": residual_norm, "largest": max(self._state.residuals, default=0.0)}
        self._event(step, "residuals_cleared", "the residuals of previous steps are damaged", evidence)
        return self._guard_acts

    def saved(self) -> dict[str, Any]:
        """Return everything that later decisions depend on, as plain data for JSON."""
        kept = {"pinned": self._pinned, "good": self._good, "settings": self._plan.settings}
        settings = {name: None if value is None else written(value) for name, value in kept.items()}
        adaptation = None if self.adaptation is None else self.adaptation.saved()
        steps = {"step": self._step, "was_dense": self._was_dense}
        auto = None if self.auto is None else {**self.auto.saved(), "of": self._compared}
        state = {"guard": self._state.saved(), "adaptation": adaptation, "auto": auto, "of": self._section}
        return {**state, **steps, **settings}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state that `saved` returned; call `begin` afterwards.

        If the section has changed since, the guard's decisions about the old settings end, with a CompressWarning, and
        `auto` compares the new settings.
        """
        self._state = GuardState.loaded(saved["guard"])
        settings = settings_of(saved["settings"])
        kept = (saved["pinned"], saved["good"])
        self._pinned, self._good = (None if text is None else settings_of(text) for text in kept)
        if self.adaptation is not None and saved["adaptation"] is not None:
            self.adaptation.load(saved["adaptation"])
        # Older state files have no such entries.
        auto = saved.get("auto")
        if self.auto is not None and auto is not None and auto.get("of", self._compared) == self._compared:
            self.auto.load(auto)
        self._plan, self._step, self._was_dense = self._loaded(settings), saved["step"], saved["was_dense"]
        held = self._pinned
        if not self._rolls_back:
            self._pinned, self._good, self._state = None, None, replace(self._state, floor=0)
        if saved["of"] != self._section:
            held = held or (settings if self._state.level else None)
            self._pinned, self._good = None, None
            self._state = replace(self._state, level=0, floor=0, quiet=0, residuals=())
        if held is not None and held != self._pinned:
            warnings.warn(
                f'/deepspeed_compress: the guard used "{brief(held)}" when the checkpoint was saved, but the section '
                "has changed since then; the settings of the present section are used from now on",
                CompressWarning,
                stacklevel=2,
            )

    @property
    def _rolls_back(self) -> bool:
        return self._guard is not None and self._guard_acts and self._guard.config.rollback is not None

    @property
    def _compared(self) -> dict[str, Any]:
        """Return the settings that `auto` compares with uncompressed steps, as plain data for JSON."""
        return self._config.model_dump(mode="json", include={"gradients", "weights"})

    @property
    def _section(self) -> dict[str, Any]:
        """Return the part of the section that the guard's decisions refer to, as plain data for JSON."""
        section = self._config.model_dump(mode="json", include={"gradients", "schedule", "adaptive"})
        adaptive = section["adaptive"] or {}
        for key in [key for key in ("candidates", "weights") if adaptive.get(key)]:
            # The order of candidates has no meaning.
            adaptive[key].sort(key=partial(json.dumps, sort_keys=True))
        # Older state files have no empty entries.
        for one in (adaptive, *section["schedule"]["phases"]):
            if not one.get("weights"):
                one.pop("weights", None)
        found: dict[str, Any] = json.loads(json.dumps(section))
        return found

    def _loaded(self, settings: GradientsConfig) -> StepPlan:
        """Return a plan that stands in until `begin` computes one."""
        return StepPlan(settings, self._weights(0), dense=settings.method == "none")

    def _weights(self, step: int) -> WeightsConfig:
        return self._scheduled.weights_at(step) if self.adaptation is None else self.adaptation.weights

    def _record_schedule(self, step: int, before: GradientsConfig, chosen: GradientsConfig) -> None:
        former, latter = (self._scheduled.weights_at(at) for at in (max(step - 1, 0), step))
        if (before, former) != (chosen, latter):
            weights = ("", "") if former == latter else (f", weights {brief(former)}", f", weights {brief(latter)}")
            texts = (f"{brief(settings)}{text}" for settings, text in zip((before, chosen), weights, strict=True))
            self._emit(step, "schedule", "the next part of the schedule begins", {}, *texts)

    @property
    def _guard_acts(self) -> bool:
        """Return True if the guard's decisions take effect."""
        return self._guard is not None and not self._guard.config.dry_run

    def _chosen(self, step: int) -> GradientsConfig:
        if self.auto is not None and self.auto.alone:
            return NoneGradients()
        if self._pinned is not None:
            return self._pinned
        scheduled = self._scheduled.at(step)
        return scheduled if self.adaptation is None or scheduled.method == "none" else self.adaptation.settings

    def _is_sync(self, step: int) -> bool:
        every = self._guard.config.full_sync_every if self._guard is not None and self._guard_acts else 0
        return every > 0 and (step + 1) % every == 0

    def _event(
        self, step: int, kind: str, reason: str, evidence: Mapping[str, float], before: Any = None, after: Any = None
    ) -> None:
        former, latter = (brief(settings or self._plan.settings) for settings in (before, after))
        self._emit(step, kind, reason, evidence, former, latter)

    def _emit(self, step: int, kind: str, reason: str, evidence: Mapping[str, float], former: str, latter: str) -> None:
        dry = self._guard is not None and not self._guard_acts and kind not in _NOT_FROM_GUARD
        self._record(Event(step, kind, reason, dict(evidence), former, latter, dry))


def _rung(chosen: GradientsConfig, level: int) -> GradientsConfig:
    if not level:
        return chosen
    rungs = ladder(chosen)
    return rungs[min(level, len(rungs) - 1)]
