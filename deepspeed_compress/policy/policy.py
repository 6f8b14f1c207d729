"""What is in force in the next step: the schedule, softened by the guard, and every decision told as an event."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepspeed_compress.config import CompressConfig, GradientsConfig, WeightsConfig, brief, settings_of, written
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor import Event
from deepspeed_compress.policy.adaptation import Adaptation
from deepspeed_compress.policy.adaptive import Available
from deepspeed_compress.policy.guard import Anomaly, Guard, GuardState
from deepspeed_compress.policy.ladder import ladder
from deepspeed_compress.policy.measurement import Measurement
from deepspeed_compress.policy.observation import Observation
from deepspeed_compress.policy.schedule import Scheduled

__all__ = ["Actions", "Policy", "StepPlan"]

_NOT_OF_GUARD = frozenset({"schedule", "adapt"})
"""Events that are carried out whatever the guard may do."""


@dataclass(frozen=True)
class StepPlan:
    """One optimizer step: settings of `gradients` and of `weights`. `dense`: nothing is compressed, weights included.
    `flush`: besides, what memories hold goes with the gradients. `sync`: this is a full synchronisation. `probe`: the
    step is measured for `Policy.adapt`. `changed`: settings of gradients are others than in the step before."""

    settings: GradientsConfig
    weights: WeightsConfig
    dense: bool = False
    flush: bool = False
    sync: bool = False
    probe: bool = False
    changed: bool = False

    @property
    def text(self) -> str:
        """What is in force of gradients, in short form."""
        return "none" if self.dense else brief(self.settings)


@dataclass(frozen=True)
class Actions:
    """What is to be done after a step: look whether residuals are damaged; go back to the last checkpoint."""

    check_residuals: bool = False
    load_checkpoint: bool = False


class Policy:
    """Decides between steps; every rank has one, and gives it the same observations.

    `total`: optimizer steps of training, where the schedule has phases. `record` gets the events. `available`: what
    may be chosen, where the section is adaptive.
    """

    def __init__(
        self,
        config: CompressConfig,
        total: int | None,
        record: Callable[[Event], None],
        available: Available = Available(),  # noqa: B008  (frozen)
    ) -> None:
        self._config = config
        self._guard = None if config.guard is None else Guard(config.guard)
        self._scheduled = Scheduled(config, total)
        self.adaptation = None if config.adaptive is None else Adaptation(config, available)
        self._record = record
        self._state = GuardState()
        self._pinned: GradientsConfig | None = None
        """Settings that hold in place of the schedule, after it led to worse."""
        self._good: GradientsConfig | None = None
        """Settings in force when the smoothed loss was best."""
        self._plan = self._loaded(self._chosen(0))
        self._step = 0
        """Of the plan."""
        self._was_dense = self._plan.dense
        """Whether nothing was compressed in the step before that of the plan."""

    @property
    def guards(self) -> bool:
        """Whether gradient norms and residuals are watched."""
        return self._guard is not None

    @property
    def observes(self) -> bool:
        """Whether observations change anything."""
        return self._guard is not None or self.adaptation is not None

    def begin(self, step: int) -> StepPlan:
        """The plan of optimizer step `step` (0-based), which begins."""
        chosen, before = self._chosen(step), self._chosen(max(step - 1, 0))
        if self.adaptation is None:
            self._tell_schedule(step, before, chosen)
        if step != self._step:
            self._step, self._was_dense = step, self._plan.dense
        settings = _rung(chosen, self._state.level if self._acts else 0)
        changed = settings != self._plan.settings
        if changed:
            # Other settings leave other residuals.
            self._state = replace(self._state, residuals=())
        # Where gradients are left to DeepSpeed, weights may be compressed all the same, except in the warm-up.
        weights_alone = self._config.gradients.method == "none"
        off = step < self._config.schedule.warmup_steps if weights_alone else settings.method == "none"
        # What waits in memories would grow old while nothing is compressed.
        stops = off and not self._was_dense
        sync = not off and self._is_sync(step)
        probe = self.adaptation is not None and step > self._config.schedule.warmup_steps and self.adaptation.due(step)
        dense, flush = off or sync, stops or sync
        self._plan = StepPlan(settings, self._weights(step), dense, flush, sync, probe, changed)
        return self._plan

    def adapt(self, step: int, seen: Measurement) -> None:
        """Choose anew after the finished `step`, which was a probe."""
        assert self.adaptation is not None
        before, after, evidence = self.adaptation.choose(step, seen)
        if before != after:
            reason = "sooner at a loss, by what was measured"
            self._tell(step, "adapt", reason, evidence, before.text, after.text)

    def skips(self, norm: float) -> bool:
        """Whether a step must not be applied, by the norm of its gradients (see `Observation`)."""
        return self._guard is not None and self._acts and self._guard.skips(self._state, norm)

    def wants_residuals(self, step: int) -> bool:
        """Whether the observation of the finished `step` (from 1) is to have the residual norm."""
        looks = self._guard is not None and step % self._guard.config.residual_every == 0
        return looks and not self._plan.dense

    def observe(self, seen: Observation) -> Actions:
        """Learn from a finished step."""
        if self._plan.sync:
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
            reason = f"{self._guard.config.cooldown_steps} steps without anomaly"
            self._event(seen.step, "return", reason, {}, former, latter)
        if self._state.smoothed is not None and self._state.smoothed == self._state.best and verdict.behind is None:
            self._good = self._plan.settings
        load = verdict.behind is not None and self._roll_back(seen.step, verdict.behind, chosen)
        return Actions(check_residuals=bool(verdict.anomalies), load_checkpoint=load)

    def _roll_back(self, step: int, why: Anomaly, chosen: GradientsConfig) -> bool:
        """To the settings of the best loss, else to softer ones; when nothing is compressed, to a checkpoint."""
        now, level = self._plan.settings, self._state.level + 1
        if now.method == "none":
            return self._load(step, why)
        pins = self._good is not None and self._good != now
        after = self._good if pins else _rung(chosen, level)
        self._event(step, "rollback", why.reason, why.evidence, now, after)
        if self._acts and pins:
            self._pinned = self._good
        elif self._acts:
            self._state = replace(self._state, level=level, floor=level)
        return False

    def _load(self, step: int, why: Anomaly) -> bool:
        rollback = self._config.guard.rollback if self._config.guard is not None else None
        if rollback is None or not rollback.checkpoint:
            return False
        self._event(step, "checkpoint_rollback", why.reason, why.evidence)
        return self._acts

    def damaged(self, step: int, residual_norm: float) -> bool:
        """Whether residuals of `residual_norm`, after an anomaly in optimizer step `step`, are to be cleared."""
        if self._guard is None or not self._guard.damaged(self._state, residual_norm):
            return False
        evidence = {"residual_norm": residual_norm, "largest": max(self._state.residuals, default=0.0)}
        self._event(step, "residuals_cleared", "what was kept from former steps is damaged", evidence)
        return self._acts

    def saved(self) -> dict[str, Any]:
        """All that the decisions of later steps depend on, as JSON has it."""
        kept = {"pinned": self._pinned, "good": self._good, "settings": self._plan.settings}
        settings = {name: None if value is None else written(value) for name, value in kept.items()}
        adaptation = None if self.adaptation is None else self.adaptation.saved()
        steps = {"step": self._step, "was_dense": self._was_dense}
        return {"guard": self._state.saved(), "adaptation": adaptation, "of": self._of, **steps, **settings}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` gave; call `begin` afterwards.

        Where the section says other settings now, what the guard had decided of the former ones ends (CompressWarning).
        """
        self._state = GuardState.loaded(saved["guard"])
        settings = settings_of(saved["settings"])
        kept = (saved["pinned"], saved["good"])
        self._pinned, self._good = (None if text is None else settings_of(text) for text in kept)
        if self.adaptation is not None and saved["adaptation"] is not None:
            self.adaptation.load(saved["adaptation"])
        self._plan, self._step, self._was_dense = self._loaded(settings), saved["step"], saved["was_dense"]
        held = self._pinned
        if not self._rolls_back:
            self._pinned, self._good, self._state = None, None, replace(self._state, floor=0)
        if saved.get("of", self._of) != self._of:
            held = held or (settings if self._state.level else None)
            self._pinned, self._good = None, None
            self._state = replace(self._state, level=0, floor=0, quiet=0, residuals=())
        if held is not None and held != self._pinned:
            warnings.warn(
                f'/deepspeed_compress: the guard held "{brief(held)}" when the checkpoint was saved, under another '
                "section; from now on what the present one says is in force",
                CompressWarning,
                stacklevel=2,
            )

    @property
    def _rolls_back(self) -> bool:
        return self._guard is not None and self._acts and self._guard.config.rollback is not None

    @property
    def _of(self) -> dict[str, Any]:
        """What the decisions of the guard are about, as JSON has it."""
        section = self._config.model_dump(mode="json", include={"gradients", "schedule", "adaptive"})
        adaptive = section["adaptive"] or {}
        for key in [key for key in ("candidates", "weights") if adaptive.get(key)]:
            # Their order means nothing.
            adaptive[key].sort(key=partial(json.dumps, sort_keys=True))
        # States of before do not have what says nothing.
        for one in (adaptive, *section["schedule"]["phases"]):
            if not one.get("weights"):
                one.pop("weights", None)
        found: dict[str, Any] = json.loads(json.dumps(section))
        return found

    def _loaded(self, settings: GradientsConfig) -> StepPlan:
        """What is as good as a plan until `begin` makes one."""
        return StepPlan(settings, self._weights(0), dense=settings.method == "none")

    def _weights(self, step: int) -> WeightsConfig:
        return self._scheduled.weights_at(step) if self.adaptation is None else self.adaptation.weights

    def _tell_schedule(self, step: int, before: GradientsConfig, chosen: GradientsConfig) -> None:
        former, latter = (self._scheduled.weights_at(at) for at in (max(step - 1, 0), step))
        if (before, former) != (chosen, latter):
            weights = ("", "") if former == latter else (f", weights {brief(former)}", f", weights {brief(latter)}")
            texts = (f"{brief(settings)}{text}" for settings, text in zip((before, chosen), weights, strict=True))
            self._tell(step, "schedule", "another part of the schedule begins", {}, *texts)

    @property
    def _acts(self) -> bool:
        """Whether decisions are carried out."""
        return self._guard is not None and not self._guard.config.dry_run

    def _chosen(self, step: int) -> GradientsConfig:
        if self._pinned is not None:
            return self._pinned
        scheduled = self._scheduled.at(step)
        return scheduled if self.adaptation is None or scheduled.method == "none" else self.adaptation.settings

    def _is_sync(self, step: int) -> bool:
        every = self._guard.config.full_sync_every if self._guard is not None and self._acts else 0
        return every > 0 and (step + 1) % every == 0

    def _event(
        self,
        step: int,
        kind: str,
        reason: str,
        evidence: Mapping[str, float],
        before: Any = None,
        after: Any = None,
    ) -> None:
        former, latter = (brief(settings or self._plan.settings) for settings in (before, after))
        self._tell(step, kind, reason, evidence, former, latter)

    def _tell(self, step: int, kind: str, reason: str, evidence: Mapping[str, float], former: str, latter: str) -> None:
        dry = self._guard is not None and not self._acts and kind not in _NOT_OF_GUARD
        self._record(Event(step, kind, reason, dict(evidence), former, latter, dry))


def _rung(chosen: GradientsConfig, level: int) -> GradientsConfig:
    if not level:
        return chosen
    rungs = ladder(chosen)
    return rungs[min(level, len(rungs) - 1)]
