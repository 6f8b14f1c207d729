"""Compression of one engine, from step to step: the settings in force, residuals, momenta, and decisions."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_compress.collectives.objects import of_first
from deepspeed_compress.collectives.pace import make_pace
from deepspeed_compress.collectives.reducer import Run, StepClock, chunk_numel
from deepspeed_compress.collectives.reduction import GroupedReductions, ReductionContext
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.config import SECTION, PowerSGDGradients, WeightsConfig, total_steps
from deepspeed_compress.errors import CompressWarning, SeamError
from deepspeed_compress.monitor import Event, EventLog, Journal, Meter, StatisticsWriter, StepStatistics
from deepspeed_compress.monitor.journal import utc_now
from deepspeed_compress.policy.decider import Observation, StepPlan
from deepspeed_compress.policy.policy import Policy
from deepspeed_compress.session.engine import BackgroundCheckpoints, EngineDescription, IslandExchanges
from deepspeed_compress.session.gradients import GradientReductions
from deepspeed_compress.session.observer import Losses, StepWatch, largest_of_all, new_run
from deepspeed_compress.session.patches import Patches, SwitchedPatches
from deepspeed_compress.session.probing import Prober, WeightTraffic
from deepspeed_compress.session.reporting import Reporter
from deepspeed_compress.session.residual_state import FinishedStep, ResidualState


class ExactWeights:
    """Updater of an engine's weights: compressed ones lag behind the fp32 master weights by one compression error.

    Bringing them up to date is a collective. It is done in calls that all ranks must make: `save_checkpoint` and
    `load_checkpoint` (`checkpointing/deepspeed`), `save_16bit_model`, `models.save_pretrained`; under Trainer before
    each of its checkpoints and when training ends (`integrations`). Reading a state dict must not wait for other ranks,
    because rank 0 may do it alone.

    Args:
        steps_taken: returns the number of optimizer steps that the engine has taken.
        update: copies the fp32 master weights into the weights of all ranks. Collective.
        meter: counts what `update` sends.
    """

    def __init__(self, steps_taken: Callable[[], int], update: Callable[[], None], meter: Meter) -> None:
        self._steps_taken = steps_taken
        self._update = update
        self._meter = meter
        self._exact_at = steps_taken()

    @property
    def behind(self) -> bool:
        """Return True if weights may lag behind the fp32 master weights; the same on all ranks."""
        return self._steps_taken() != self._exact_at

    def synchronise(self) -> None:
        """Copy the fp32 master weights into the weights of all ranks if they may lag. All ranks must call it."""
        if self.behind:
            self.renew()

    def renew(self) -> None:
        """Do the same as `synchronise`, even if the weights seem exact, as after loading."""
        with self._meter.counting_exact_weights():
            self._update()
        self._exact_at = self._steps_taken()


class Session:
    """Compression of one engine, available as `engine.compression` for the life of the engine.

    Seams reduce every bucket with `gradients`, and call `finish` when an optimizer step is over. The settings in force
    change only in `finish` and `begin`. All ranks call the same methods in the same order; making a session is
    collective in the group of the description.

    Args:
        engine: description of the engine.
        patches: the attributes that are replaced on the engine; undone by `detach`.
        saving: checkpoints that are written in the background; None if saving blocks training.

    Examples:
        In a training script:

        >>> engine, *_ = deepspeed_compress.initialize(model=model, config="ds_config.json")
        >>> engine.compression.subscribe(lambda figures: print(figures.step, figures.ratio))
        >>> engine.compression.report_metric(validation_loss)
    """

    def __init__(
        self, engine: EngineDescription, patches: Patches, saving: BackgroundCheckpoints | None = None
    ) -> None:
        config, group, device = engine.config, engine.group, engine.device
        self.config, self.parameters, self.patches, self.saving = config, engine.parameters, patches, saving
        self.clock, self.meter = StepClock(), engine.meter
        pace = make_pace(config.communication, group)
        self.run = Run(self.clock, self.meter, config.seed, pace, chunk_numel(device))
        """Clock, meter, seed and pace, which all reducers share."""
        self.journal = Journal(config.monitor.path, new_run(group), engine.step, of_first(utc_now(), group))
        self.log = EventLog(self.journal, engine.writes, engine.island)
        self._reporter = Reporter(config.monitor, self.meter, engine.byte_report, device, group)
        writer = StatisticsWriter(self.journal, engine.sink)
        if writer.active:
            self.subscribe(writer.write)
        total = total_steps(engine.document, config.schedule)
        self.policy = Policy(config, total, self.log.record, engine.differences)
        self.reductions: GroupedReductions | None = None
        """Reducers for each choice of gradient settings; None for method "none", which leaves them to the engine."""
        compresses = config.gradients.method != "none"
        stores = ResidualStores(engine.transactional and compresses)
        if compresses:
            context = ReductionContext(engine.make_groups(), engine.parameters, stores, self.run)
            self.reductions = GroupedReductions(context, engine.find_separate())
        self.residuals = ResidualState(stores, config)
        """Residuals and momenta."""
        self._largest = partial(largest_of_all, device=device, group=engine.deciding)
        self.losses = Losses(device, engine.deciding) if self.policy.observes else None
        """Mean losses of all ranks; None if the policy does not observe them."""
        self.watch = None if config.auto is None else StepWatch(device)
        """Stopwatch of the steps; None if the policy does not compare them."""
        self.prober: Prober | None = None
        """Measurements of candidates; None if the policy does not adapt."""
        if self.policy.adaptation is not None:
            self.prober = Prober(self.policy.adaptation.selector, self.parameters, device, engine.deciding)
        self.gradients = GradientReductions(config, self.policy, self.reductions, self.residuals, self.run, self.prober)
        """Reductions of gradient buckets."""
        self.exact: ExactWeights | None = None
        """Updater of compressed weights; None if weights never lag behind the fp32 master weights."""
        self.islands: IslandExchanges | None = None
        """Exchanges with other islands; None if all ranks train as one."""
        self.saved: list[Path] = []
        """Directories of the checkpoints that this run has saved, oldest first."""
        self.resumed: Mapping[str, Any] | None = None
        """Client state of the checkpoint from which the engine resumed when it was made; None for a new run."""
        self._weight_traffic = WeightTraffic()
        self._switched: list[SwitchedPatches] = []
        self._exchange_ms = 0.0
        """Milliseconds that the running step, if it is measured, has waited for other islands."""

    def send_weights(self, exact: ExactWeights, traffic: WeightTraffic | None = None) -> None:
        """Let `exact` bring weights up to date that are sent as differences from now on, in messages of `traffic`."""
        self.exact = exact
        self._weight_traffic = traffic or WeightTraffic()

    def join_islands(self, islands: IslandExchanges) -> None:
        """Exchange with other islands after steps from now on."""
        self.islands = islands

    @property
    def events(self) -> Sequence[Event]:
        """Return the decisions in this process so far."""
        return self.log.events

    @property
    def settings(self) -> str:
        """Return the settings in force in the running step in short form: "blockwise bits=4"."""
        return self.plan.text

    @property
    def alone(self) -> bool:
        """Return True if the engine itself reduces gradients in the running step, uncompressed."""
        return self.plan.alone or self.reductions is None

    @property
    def weights(self) -> WeightsConfig | None:
        """Return the weight settings of the running step; None if the engine itself gathers weights."""
        return self.gradients.weights

    @property
    def plan(self) -> StepPlan:
        """Return the plan of the running step."""
        return self.gradients.plan

    def synchronise(self) -> None:
        """Make the weights on all ranks exact, as before a state dict is collected.

        All ranks must call it. It does nothing if weights are not compressed.
        """
        if self.exact is not None:
            self.exact.synchronise()

    def renew_weights(self) -> None:
        """Make the weights on all ranks exact after an engine has changed or loaded them; see `synchronise`."""
        if self.exact is not None:
            self.exact.renew()

    def subscribe(self, sink: Callable[[StepStatistics], None]) -> None:
        """Pass the statistics of measured steps to `sink` from now on, on ranks that report. Call it on all ranks."""
        self._reporter.sinks.append(sink)

    def compare_again(self) -> int:
        """Repeat the comparison of `auto`, for instance because the network has changed.

        Call it on all ranks, between optimizer steps.

        Returns:
            The smallest number of steps until the next choice is in force; 0 without `auto`.
        """
        auto = self.policy.auto
        if auto is None:
            return 0
        auto.restart()
        self.begin(self.clock.step, self.clock.loss_scale)
        return auto.length

    def report_metric(self, value: float) -> None:
        """Judge this step by `value` (less is better) instead of the loss, for `guard.rollback`.

        Call it on all ranks or on one; the mean is used.
        """
        if self.losses is not None:
            self.losses.report(value)

    def replace_reduction(self, replace: Callable[[Patches], None], count: Callable[[Patches], None]) -> None:
        """Replace the engine's reduction of gradients. In steps of the engine alone, only count its bytes.

        Args: see `SwitchedPatches`.
        """
        if self.config.auto is None:
            (count if self.alone else replace)(self.patches)
            return
        self._switched.append(SwitchedPatches(replace, count))
        self.patches.on_undo(self._switched[-1].undo)

    def finish(self, finished: FinishedStep) -> bool:
        """Finish a step: update residuals, report, decide, and begin the next step. Collective.

        Returns True if the checkpoint saved last is to be loaded.
        """
        self.residuals.settle(finished, self.plan.dense)
        step_ms = self._reporter.step_ended()
        # A skipped step is shorter than others, so its time says nothing about theirs.
        timed_ms = step_ms if finished.applied else None
        seen = self._observe(finished, timed_ms)
        if self._reporter.due(finished.step):
            if self.alone:
                self.meter.bytes_raw = self.meter.bytes_sent
            norm = partial(self.residuals.residual_norm, finished.scale_after)
            self._reporter.report(seen, finished.samples, self.plan, step_ms, norm)
        actions = self.policy.observe(seen)
        if self.plan.probe and self.prober is not None:
            self._adapt(self.prober, finished, timed_ms)
        if actions.check_residuals:
            self._check_residuals(finished)
        if self.watch is not None:
            self._compare(self.watch, finished)
        self.begin(finished.step, finished.scale_after)
        return actions.load_checkpoint

    def exchange_with_islands(self, step: int) -> None:
        """Exchange with other islands after optimizer step `step` (1-based), if an exchange is due."""
        if self.islands is None:
            return
        self.islands.step_ended(step)
        if self.plan.probe:
            # The meter has begun the next step, whose gradients have not been waited for yet.
            self._exchange_ms = self.meter.milliseconds()["communicate"]

    def decisions(self) -> dict[str, Any]:
        """Return the state that the next decisions depend on, as JSON values; equal on all ranks."""
        return {
            "run": self.journal.part.id,
            "policy": self.policy.saved(),
            "losses": self.losses.saved() if self.losses is not None else None,
        }

    def load_decisions(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `decisions` returned; call `begin` afterwards."""
        self.journal.adopt(saved.get("run"))
        self.policy.load(saved["policy"])
        if self.losses is not None:
            self.losses.load(saved["losses"])

    def checkpoint_saved(self, directory: Path) -> None:
        """Have `guard.rollback` load the checkpoint in the tag directory `directory` from now on."""
        self.saved = [*(one for one in self.saved if one != directory), directory]

    def training_resumed(self, client_state: Mapping[str, Any]) -> None:
        """Note that the engine, when it was made, has loaded a checkpoint with `client_state`."""
        self.resumed = client_state

    def begin(self, step: int, loss_scale: float) -> None:
        """Start optimizer step `step` (0-based), whose gradients carry the factor `loss_scale`."""
        self.clock.begin(step, loss_scale)
        self.gradients.begin(step)
        for patches in self._switched:
            patches.follow(self.alone)
        scale = self.gradients.scale
        if self.plan.changed and isinstance(self.plan.settings, PowerSGDGradients) and scale is not None:
            self.residuals.hand_over_means(scale)
        self._exchange_ms = 0.0
        self.meter.reset(timed=self.plan.probe or self._reporter.due(step + 1))

    def _observe(self, finished: FinishedStep, timed_ms: float | None) -> Observation:
        loss, mean_ms = (None, None) if self.losses is None else self.losses.next(timed_ms)
        guard = self.policy.guard
        wants_residuals = guard is not None and guard.wants_residuals(finished.step, self.plan)
        residuals = self._largest_residual(finished) if wants_residuals else None
        return Observation(finished.step, finished.applied, finished.grad_norm, loss, residuals, mean_ms)

    def _adapt(self, prober: Prober, finished: FinishedStep, timed_ms: float | None) -> None:
        """Let the policy choose by this step.

        If the step was skipped or its time is unknown, drop its samples; the next step is measured instead.
        """
        if timed_ms is None:
            prober.forget()
            return
        waited = self.meter.milliseconds()["communicate"] - self._exchange_ms
        group = self.gradients.reducer.group
        measured = prober.measure(group, waited / 1e3, timed_ms / 1e3, self._weight_traffic)
        assert self.policy.adaptation is not None
        self.policy.adaptation.choose(finished.step, measured)
        # The measurement is not part of any step's time.
        self._reporter.step_ended()

    def _compare(self, watch: StepWatch, finished: FinishedStep) -> None:
        """Let the policy compare compressed with uncompressed steps. Collective at the end of a run of one kind.

        A skipped step is shorter than others, so it is repeated.
        """
        auto = self.policy.auto
        assert auto is not None
        step_ms, shapes = watch.finish(timed=finished.applied and auto.times_next)
        if finished.applied and auto.see(step_ms, shapes):
            auto.choose(finished.step, self._largest(auto.figures(self._can_switch())))

    def _can_switch(self) -> bool:
        """Return True if the next step may be compressed if this one was not, or the reverse; warn if not."""
        try:
            for patches in self._switched:
                patches.check()
        except SeamError as error:
            text = f"/{SECTION}/auto: the comparison ends, and this run continues as it is, because {error}"
            warnings.warn(text, CompressWarning, stacklevel=2)
            return False
        return True

    def _check_residuals(self, finished: FinishedStep) -> None:
        """Clear the residuals on all ranks if those of one are damaged, because they would feed the damage back."""
        guard, largest = self.policy.guard, self._largest_residual(finished)
        if guard is not None and largest is not None and guard.damaged(finished.step, self.plan, largest):
            self.residuals.clear_residuals()

    def _largest_residual(self, finished: FinishedStep) -> float | None:
        """Return the largest residual norm of all ranks; inf if one is NaN, None if not observed. Collective."""
        norm = self.residuals.residual_norm(finished.scale_after)
        return None if self.losses is None or norm is None else self._largest([norm])[0]
