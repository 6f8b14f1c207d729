"""Compression of one engine: which reducer is in force, and what a finished step does to what is remembered."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed_compress.communication.buckets import Partition
from deepspeed_compress.communication.payload import PayloadReducer, PendingMeans
from deepspeed_compress.communication.probes import cosine_with_truth, true_sum
from deepspeed_compress.communication.reducer import Pending, Reduced, Reducer, Run
from deepspeed_compress.communication.reduction import Parameters, Reductions
from deepspeed_compress.compression.residuals import Residuals, ResidualStores
from deepspeed_compress.compression.segments import gather
from deepspeed_compress.config import (
    CompressConfig,
    CompressedGradients,
    PowerSGDGradients,
    WeightsConfig,
)
from deepspeed_compress.config.methods import NoCompression
from deepspeed_compress.monitor import Event, StepStatistics
from deepspeed_compress.policy import Observation, Policy, StepPlan
from deepspeed_compress.session.beside import Exchanges, Saving, Watch
from deepspeed_compress.session.exact import ExactWeights
from deepspeed_compress.session.observer import StepMeans
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.probing import Prober, WeightTraffic
from deepspeed_compress.session.records import Records
from deepspeed_compress.session.remembered import FinishedStep, Remembered

__all__ = ["Session"]


class Session:
    """Compression of one engine, as `engine.compression`, for as long as the engine lives.

    DeepSpeed's seams call `reduce` or `start` for every bucket, and `finish` when an optimizer step is over; between
    two of those calls nothing of what is in force changes. All ranks call the same methods in the same order.

    Args:
        config: the section.
        policy: decides at the beginning of every step what is in force.
        run: step clock, meter, seed and pace, shared with all reducers.
        reductions: the reducers of settings of gradients; None for method "none", which leaves them to DeepSpeed.
        records: what is written.
        watch: None where the policy observes nothing.
        patches: what is replaced on the engine; undone by `detach`.

    Examples:
        In a training script:

        >>> engine, *_ = deepspeed_compress.initialize(model=model, config="ds_config.json")
        >>> engine.compression.subscribe(lambda figures: print(figures.step, figures.ratio))
        >>> engine.compression.report_metric(validation_loss)
    """

    def __init__(
        self,
        config: CompressConfig,
        policy: Policy,
        run: Run,
        reductions: Reductions | None,
        records: Records,
        watch: Watch | None,
        patches: Patches,
    ) -> None:
        self.config = config
        self.policy = policy
        self.meter = run.meter
        self.clock = run.clock
        self.pace = run.pace
        self.patches = patches
        self.last_saved: Path | None = None
        """Directory of the checkpoint that this run has saved last."""
        self.saving: Saving | None = None
        """Checkpoints that are written beside training; None where saving waits for them."""
        self.resumed: Mapping[str, Any] | None = None
        """What the program had saved with the checkpoint that the engine went on from when it was made; None where it
        began anew."""
        self.islands: Exchanges | None = None
        """Exchanges with other islands; None where all ranks train as one."""
        self.exact: ExactWeights | None = None
        """Of compressed weights of which every rank has a copy; None where weights are never behind their masters."""
        self.journal = records.journal
        stores = ResidualStores(False) if reductions is None else reductions.site.stores
        self.remembered = Remembered(stores, config)
        """Residuals and momenta."""
        self._plan = StepPlan(config.gradients, config.weights)
        self._met_ms = 0.0
        """What a step that is measured has waited for other islands."""
        self._scale: float | None = None
        """Of the sums that all ranks get, as they were last reduced."""
        self._reducer: Reducer | None = None
        self._reductions = reductions
        self._records = records
        self._watch = watch
        self._discards: list[Callable[[], None]] = []

    @property
    def events(self) -> Sequence[Event]:
        """Decisions in this process so far."""
        return self._records.log.events

    @property
    def stores(self) -> Mapping[str, Residuals]:
        """Residuals and momenta, by what they hold ("gradients", "means", "velocity" ...)."""
        return self.remembered.by_name

    @property
    def parameters(self) -> Parameters | None:
        """Of the model, as reducers know them; None where reduction is left to DeepSpeed."""
        return None if self._reductions is None else self._reductions.site.parameters

    @property
    def reducer(self) -> Reducer:
        """The reducer of the running step."""
        assert self._reducer is not None, 'method "none" leaves reduction to DeepSpeed, and others begin with a step'
        return self._reducer

    def chosen_reducer(self, step: int) -> Reducer:
        """The reducer of what the configuration says, whatever is in force, in optimizer step `step` (0-based)."""
        gradients = self.config.gradients
        assert self._reductions is not None
        assert isinstance(gradients, CompressedGradients)
        return self._reductions.at(gradients, step).compressed

    @property
    def settings(self) -> str:
        """What is in force in the running step, in short form: "blockwise bits=4"."""
        return self._plan.text

    @property
    def dense(self) -> bool:
        """Whether the running step sends everything uncompressed."""
        return self._plan.dense

    @property
    def weights(self) -> WeightsConfig:
        """Settings of weights in the running step; of uncompressed ones where nothing is compressed."""
        return NoCompression() if self.dense else self._plan.weights

    @property
    def reports(self) -> bool:
        """Whether the running step is measured for those who listen: in all islands or in none, as no other is."""
        return self._records.reporter.due(self.clock.step + 1)

    @property
    def synchronises(self) -> bool:
        """Whether the running step ends with exact weights everywhere."""
        return self._plan.sync

    def synchronise(self) -> None:
        """Make the weights on all ranks exact, as before a state dict is collected. All ranks must call it; where
        weights are not compressed it does nothing."""
        if self.exact is not None:
            self.exact.synchronise()

    def renew_weights(self) -> None:
        """Make the weights on all ranks exact after an engine has changed or loaded them; see `synchronise`."""
        if self.exact is not None:
            self.exact.renew()

    def subscribe(self, sink: Callable[[StepStatistics], None]) -> None:
        """From now on `sink` gets the statistics of measured steps, on the ranks that report. Call it on all ranks."""
        self._records.reporter.sinks.append(sink)

    def record(self, event: Event) -> None:
        """Write `event` down with the decisions of the run."""
        self._records.log.record(event)

    def report_metric(self, value: float) -> None:
        """Judge this step by `value` (less is better) in place of the loss, for `guard.rollback`. Call it on all ranks
        or on one; the mean counts."""
        if self._watch is not None:
            self._watch.losses.report(value)

    def follow_weights(self, traffic: WeightTraffic) -> None:
        """Let an adaptive policy know what is sent of weights whose settings it may choose."""
        if self._watch is not None and self._watch.prober is not None:
            self._watch.prober.weights = traffic

    def reduce(self, bucket: Tensor, partition: Partition, scale: float, everywhere: bool) -> None:
        """Reduce `bucket` in place: to its owners, or `everywhere` (see `PayloadReducer`)."""
        reducer = self.reducer
        self._sample(bucket, partition, everywhere)
        self._scale = scale
        operation = reducer.all_reduce if everywhere else reducer.reduce_scatter
        self._count(partition, everywhere)
        truth = true_sum(reducer.group, bucket) if self._sampled() else None
        operation(bucket, partition, scale)
        if truth is not None:
            own = partition.owned_by(reducer.group.rank())
            self.meter.cosine = cosine_with_truth(reducer.group, bucket, truth, own)

    @property
    def early_reducer(self) -> PayloadReducer | None:
        """The reducer of the running step if reductions may begin before it is certain that they are asked for: it
        leaves buckets alone, and what it writes into memories can be forgotten. None in steps that are measured."""
        reducer = self.reducer
        alone = not isinstance(reducer, PayloadReducer) or reducer.group.size() == 1
        if alone or not self.remembered.transactional or self._plan.probe or self._compares():
            return None
        assert isinstance(reducer, PayloadReducer)
        return reducer

    def forget_step(self) -> None:
        """What the running step has written into memories was written in vain."""
        self.remembered.rollback()

    def on_interruption(self, discard: Callable[[], None]) -> None:
        """Have `discard_unfinished` call `discard`, which drops reductions that were begun and never finished."""
        self._discards.append(discard)

    def discard_unfinished(self) -> None:
        """Drop what a backward pass that failed has sent, so that nothing of it gets into what is loaded next.
        Collective."""
        for discard in self._discards:
            discard()

    def start_early(
        self, bucket: Tensor, partition: Partition, scale: float, number: int, everywhere: bool
    ) -> Pending | PendingMeans:
        """Begin by the `early_reducer`, for owners or `everywhere`, with messages from `number` on; `bucket` stays."""
        reducer = self.early_reducer
        assert reducer is not None, "nothing may begin early in this step"
        self._count(partition, everywhere)
        self._scale = scale
        begin = reducer.start_all_reduce if everywhere else reducer.start_reduce_scatter
        return begin(bucket, partition, scale, number)

    def start(self, bucket: Tensor, partition: Partition, scale: float) -> Pending:
        """Begin to reduce `bucket` to its owners; it may be overwritten."""
        if self._sampled():
            self.reduce(bucket, partition, scale, everywhere=False)
            own = partition.owned_by(self.reducer.group.rank())
            return Reduced(own, gather(bucket, own))
        self._sample(bucket, partition, everywhere=False)
        self._count(partition, everywhere=False)
        return self.reducer.start_reduce_scatter(bucket, partition, scale)

    def start_everywhere(self, bucket: Tensor, partition: Partition, scale: float) -> PendingMeans | None:
        """Begin to reduce `bucket` for all; None where nothing can be left for later, and it is done."""
        reducer = self.reducer
        if not isinstance(reducer, PayloadReducer) or reducer.group.size() == 1 or self._sampled():
            self.reduce(bucket, partition, scale, everywhere=True)
            return None
        self._sample(bucket, partition, everywhere=True)
        self._count(partition, everywhere=True)
        self._scale = scale
        return reducer.start_all_reduce(bucket, partition, scale)

    def _sample(self, bucket: Tensor, partition: Partition, everywhere: bool) -> None:
        """Let an adaptive policy measure its candidates on `bucket`."""
        if self._plan.probe and self._watch is not None and self._watch.prober is not None:
            self._watch.prober.see(bucket, partition, self.reducer.group.rank(), everywhere)

    def _count(self, partition: Partition, everywhere: bool) -> None:
        """The bytes of parameters that are exempt, small, or chosen by an override."""
        if self.meter.timed:
            transfers = self.reducer.transfers(partition, everywhere)
            self.meter.bytes_raw += sum(one.uncompressed_bytes for one in transfers)

    def _compares(self) -> bool:
        """Whether the running step, every `cosine_every`-th, compares one of its buckets with the truth."""
        every = self.config.monitor.cosine_every
        return every > 0 and (self.clock.step + 1) % every == 0 and not self.dense

    def _sampled(self) -> bool:
        """Whether to compare this bucket: the first one."""
        return self._compares() and self.meter.cosine is None

    def finish(self, finished: FinishedStep) -> bool:
        """Settle the memories, report, decide, and begin the next step; whether the last checkpoint is to be loaded."""
        self.remembered.settle(finished, self.dense)
        step, step_ms = finished.step, self._records.reporter.step_ended()
        # A skipped step is shorter than others, and says nothing of them.
        means = (
            self._watch.losses.next(step_ms if finished.applied else None) if self._watch is not None else StepMeans()
        )
        residuals = self._largest_residual(finished) if self.policy.wants_residuals(step) else None
        seen = Observation(step, finished.applied, finished.grad_norm, means.loss, residuals, means.step_ms)
        if self._records.reporter.due(step):
            if self.config.gradients.method == "none":
                self.meter.bytes_raw = self.meter.bytes_sent
            norm = functools.partial(self.remembered.residual_norm, finished.scale_after)
            self._records.reporter.report(seen, finished.samples, self._plan, step_ms, norm)
        actions = self.policy.observe(seen)
        if self._plan.probe and self._watch is not None and self._watch.prober is not None:
            self._adapt(self._watch.prober, finished, step_ms)
        if actions.check_residuals:
            self._check_residuals(finished)
        self.begin(step, finished.scale_after)
        return actions.load_checkpoint

    def meet(self, step: int) -> None:
        """After optimizer step `step`, from 1, exchange with other islands, if it is time."""
        if self.islands is None:
            return
        self.islands.step_ended(step)
        if self._plan.probe:
            # The meter has begun the next step, whose gradients were not waited for yet.
            self._met_ms = self.meter.milliseconds()["communicate"]

    def _adapt(self, prober: Prober, finished: FinishedStep, step_ms: float | None) -> None:
        """Choose by this step, unless it was skipped or its time is not known: the next one is measured then."""
        if step_ms is None or not finished.applied:
            prober.forget()
            return
        waited = self.meter.milliseconds()["communicate"] - self._met_ms
        self.policy.adapt(finished.step, prober.measure(self.reducer.group, waited / 1e3, step_ms / 1e3))
        # The measurement is part of no step.
        self._records.reporter.step_ended()

    def _check_residuals(self, finished: FinishedStep) -> None:
        """Clear the residuals on all ranks if those of one are damaged: what is wrong would come back with them."""
        largest = self._largest_residual(finished)
        if largest is not None and self.policy.damaged(finished.step, largest):
            self.remembered.clear_residuals()

    def _largest_residual(self, finished: FinishedStep) -> float | None:
        """The largest residual norm of all ranks; inf where one is not finite. Collective."""
        norm = self.remembered.residual_norm(finished.scale_after)
        return None if self._watch is None or norm is None else self._watch.largest(norm)

    def decisions(self) -> dict[str, Any]:
        """What the next decisions depend on, as JSON has it; equal on all ranks."""
        return {
            "run": self.journal.part.id,
            "policy": self.policy.saved(),
            "losses": self._watch.losses.saved() if self._watch is not None else None,
        }

    def load_decisions(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `decisions` gave; call `begin` afterwards."""
        self.journal.adopt(saved.get("run"))
        self.policy.load(saved["policy"])
        if self._watch is not None:
            self._watch.losses.load(saved["losses"])

    def reset(self) -> None:
        """Forget everything that is kept between steps."""
        self.remembered.clear()

    def begin(self, step: int, loss_scale: float) -> None:
        """Start optimizer step `step` (0-based), whose gradients carry the factor `loss_scale`."""
        self.clock.begin(step, loss_scale)
        self._plan = self.policy.begin(step)
        if self._plan.changed and isinstance(self._plan.settings, PowerSGDGradients) and self._scale is not None:
            self.remembered.hand_over_means(self._scale)
        self._reducer = self._in_force(step)
        self._met_ms = 0.0
        self.meter.reset(timed=self._plan.probe or self._records.reporter.due(step + 1))

    def _in_force(self, step: int) -> Reducer | None:
        """The reducer of optimizer step `step`, which is resolved once, here."""
        plan, chosen = self._plan, self.config.gradients
        settings = chosen if plan.dense else plan.settings
        if self._reductions is None or not isinstance(settings, CompressedGradients):
            return None
        reduction = self._reductions.at(settings, step)
        if plan.flush:
            return reduction.flushing
        return reduction.plain if plan.dense else reduction.compressed
