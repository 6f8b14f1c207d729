"""Conclusions at the end of an optimizer step: residuals, figures, and decisions of the policy."""

import warnings
from collections.abc import Sequence
from functools import partial

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import CompressWarning, SeamError
from deepspeed_compress.policy import Actions, Observation
from deepspeed_compress.session.observer import LargestOfAll, PolicyInputs, StepMeans, StepWatch
from deepspeed_compress.session.parts import Parts
from deepspeed_compress.session.probing import Prober
from deepspeed_compress.session.protocols import StepFollower
from deepspeed_compress.session.residual_state import FinishedStep


class StepEnd:
    """Updates residuals, reports, and lets the policy decide when a step is over.

    Args:
        parts: the parts of the session.
        inputs: figures of all ranks for the policy; None if the policy observes nothing.
        largest: see `PolicyInputs`; needed if the policy compares step times.
        watch: stopwatch of the steps, in the same case.
        followers: parts of the engine that the policy's comparison concerns.
    """

    def __init__(
        self,
        parts: Parts,
        inputs: PolicyInputs | None,
        largest: LargestOfAll | None,
        watch: StepWatch | None,
        followers: Sequence[StepFollower],
    ) -> None:
        self._policy, self._settings, self._residuals = parts.policy, parts.settings, parts.residuals
        self._meter, self._reporter = parts.run.meter, parts.records.reporter
        self._inputs, self._largest, self._watch, self._followers = inputs, largest, watch, followers

    def finish(self, finished: FinishedStep, alone: bool, exchange_ms: float) -> Actions:
        """Finish a step. Collective.

        Args:
            finished: the step.
            alone: True if the engine itself has reduced gradients in it.
            exchange_ms: milliseconds that it has waited for other islands, if it is measured.

        Returns:
            What the policy wants to be done.
        """
        self._residuals.settle(finished, self._settings.plan.dense)
        step_ms = self._reporter.step_ended()
        # A skipped step is shorter than others, so its time says nothing about theirs.
        timed_ms = step_ms if finished.applied else None
        seen = self._observe(finished, timed_ms)
        self._report(seen, finished, step_ms, alone)
        actions = self._policy.observe(seen)
        prober = self._prober()
        if prober is not None:
            self._adapt(prober, finished, timed_ms, exchange_ms)
        if actions.check_residuals:
            self._check_residuals(finished)
        if self._watch is not None:
            self._compare(self._watch, finished)
        return actions

    def _observe(self, finished: FinishedStep, timed_ms: float | None) -> Observation:
        means = StepMeans() if self._inputs is None else self._inputs.losses.next(timed_ms)
        guard = self._policy.guard
        wants_residuals = guard is not None and guard.wants_residuals(finished.step, self._settings.plan)
        residuals = self._largest_residual(finished) if wants_residuals else None
        return Observation(finished.step, finished.applied, finished.grad_norm, means.loss, residuals, means.step_ms)

    def _report(self, seen: Observation, finished: FinishedStep, step_ms: float | None, alone: bool) -> None:
        if not self._reporter.due(finished.step):
            return
        if alone:
            self._meter.bytes_raw = self._meter.bytes_sent
        norm = partial(self._residuals.residual_norm, finished.scale_after)
        self._reporter.report(seen, finished.samples, self._settings.plan, step_ms, norm)

    def _prober(self) -> Prober | None:
        """Return the measurements of candidates; None in steps that measure none."""
        return self._inputs.prober if self._settings.plan.probe and self._inputs is not None else None

    def _adapt(self, prober: Prober, finished: FinishedStep, timed_ms: float | None, exchange_ms: float) -> None:
        """Let the policy choose by this step.

        If the step was skipped or its time is unknown, drop its samples; the next step is measured instead.
        """
        if timed_ms is None:
            prober.forget()
            return
        waited = self._meter.milliseconds()["communicate"] - exchange_ms
        group = self._settings.reducers.every[0].group
        assert self._policy.adaptation is not None
        self._policy.adaptation.choose(finished.step, prober.measure(group, waited / 1e3, timed_ms / 1e3))
        # The measurement is not part of any step's time.
        self._reporter.step_ended()

    def _compare(self, watch: StepWatch, finished: FinishedStep) -> None:
        """Let the policy compare compressed with uncompressed steps. Collective at the end of a run of one kind.

        A skipped step is shorter than others, so it is repeated.
        """
        auto, largest = self._policy.auto, self._largest
        assert auto is not None
        assert largest is not None
        step_ms, shapes = watch.finish(timed=finished.applied and auto.times_next)
        if finished.applied and auto.see(step_ms, shapes):
            auto.choose(finished.step, largest(auto.figures(self._can_switch())))

    def _can_switch(self) -> bool:
        """Return True if the next step may be compressed if this one was not, or the reverse; warn if not."""
        try:
            for follower in self._followers:
                follower.check()
        except SeamError as error:
            text = f"/{SECTION}/auto: the comparison ends, and this run continues as it is, because {error}"
            warnings.warn(text, CompressWarning, stacklevel=2)
            return False
        return True

    def _check_residuals(self, finished: FinishedStep) -> None:
        """Clear the residuals on all ranks if those of one are damaged, because they would feed the damage back."""
        guard, largest = self._policy.guard, self._largest_residual(finished)
        if guard is not None and largest is not None and guard.damaged(finished.step, self._settings.plan, largest):
            self._residuals.clear_residuals()

    def _largest_residual(self, finished: FinishedStep) -> float | None:
        """Return the largest residual norm of all ranks; inf if one is NaN, None if not observed. Collective."""
        norm = self._residuals.residual_norm(finished.scale_after)
        return None if self._inputs is None or norm is None else self._inputs.largest([norm])[0]
