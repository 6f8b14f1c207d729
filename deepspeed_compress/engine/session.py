"""Compression of one engine: which reducer is in force, and what a finished step does to what is remembered."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed_compress.communication import (
    Done,
    PayloadReducer,
    Pending,
    Reducer,
    StepClock,
    cosine_with_truth,
    true_sum,
)
from deepspeed_compress.communication.buckets import Partition
from deepspeed_compress.communication.build import Reduction, Stores
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import gather
from deepspeed_compress.compression.state import OWNED
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.engine.exact import ExactWeights
from deepspeed_compress.engine.observer import Losses, Means
from deepspeed_compress.engine.patches import Patches
from deepspeed_compress.engine.probing import Prober
from deepspeed_compress.engine.reporting import Reporter
from deepspeed_compress.engine.uncompressed import uncompressed_bytes
from deepspeed_compress.monitor import Event, Journal, Meter, StepStatistics
from deepspeed_compress.policy import Observation, Plan, Policy

__all__ = ["FinishedStep", "Session", "Watch"]

_RESIDUALS = frozenset({"gradients", "means", "node", "node_means"})
"""Memories of what was left out; the others are momenta, factors, and parts still to be handed on."""


@dataclass(frozen=True)
class FinishedStep:
    """What DeepSpeed did with an optimizer step: `applied` is False when it was skipped for an overflow.

    `step` and `samples` count the finished one. The loss scales are 1.0 where there is none. `grad_norm`: of the mean
    gradient, without loss scale, inf where it is not finite; None where it is not known.
    """

    step: int
    samples: int
    applied: bool
    scale_before: float
    scale_after: float
    grad_norm: float | None = None


@dataclass(frozen=True)
class Watch:
    """What a guard needs of all ranks: their losses, and from a figure of this one the largest of all."""

    losses: Losses
    largest: Callable[[float], float]


class Session:
    """Lives as long as the engine, as `engine.compression`.

    `reduction_of` gives the reducers of settings of `gradients`, all of which share the memories of `stores`. `watch`:
    None where the policy observes nothing. `prober`: None where it does not adapt.
    """

    def __init__(
        self,
        config: CompressConfig,
        policy: Policy,
        reduction_of: Callable[[Any], Reduction],
        stores: Stores,
        clock: StepClock,
        meter: Meter,
        reporter: Reporter,
        events: Sequence[Event] = (),
        watch: Watch | None = None,
        prober: Prober | None = None,
        patches: Patches | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.meter = meter
        self.clock = clock
        self.stores: Mapping[str, Residuals] = stores.by_name
        self._transactional = stores.transactional
        self.patches = patches or Patches()
        """What is replaced on the engine."""
        self.prune_owned = False
        """Set after loading the state of another number of ranks: memories of all owners are here."""
        self.last_saved: Path | None = None
        """Directory of the checkpoint that this run has saved last."""
        self.exact: ExactWeights | None = None
        """Of compressed weights of which every rank has a copy; None where weights are never behind their masters."""
        self.events = events
        """Decisions in this process so far."""
        self.journal = journal or Journal(None)
        self._plan = Plan(config.gradients)
        self._reduction_of = reduction_of
        self._reporter = reporter
        self._watch = watch
        self._prober = prober

    @property
    def reducer(self) -> Reducer:
        """The reducer of the running step."""
        assert self.config.gradients.method != "none", 'method "none" leaves reduction to DeepSpeed'
        chosen = self._reduction_of(self.config.gradients if self._plan.dense else self._plan.settings)
        if self._plan.drain:
            return chosen.draining
        return chosen.plain if self._plan.dense else chosen.compressed

    @property
    def chosen(self) -> Reducer:
        """The reducer of the settings that the configuration has chosen, whatever is in force."""
        return self._reduction_of(self.config.gradients).compressed

    @property
    def settings(self) -> str:
        """What is in force in the running step, in short form: "blockwise bits=4"."""
        return self._plan.text

    @property
    def dense(self) -> bool:
        """Whether the running step sends everything uncompressed."""
        return self._plan.dense

    @property
    def synchronises(self) -> bool:
        """Whether the running step ends with exact weights everywhere."""
        return self._plan.sync

    def synchronise(self) -> None:
        """Make the weights on all ranks exact, as before a state dict is collected. All ranks must call it; where
        weights are not compressed it does nothing."""
        if self.exact is not None:
            self.exact.synchronise()

    def subscribe(self, sink: Callable[[StepStatistics], None]) -> None:
        """From now on `sink` gets the statistics of measured steps, on the ranks that report. Call it on all ranks."""
        self._reporter.sinks.append(sink)

    def report_metric(self, value: float) -> None:
        """Judge this step by `value` (less is better) in place of the loss, for `guard.rollback`. Call it on all ranks
        or on one; the mean counts."""
        if self._watch is not None:
            self._watch.losses.report(value)

    def reduce(self, bucket: Tensor, partition: Partition, scale: float, everywhere: bool) -> None:
        """Reduce `bucket` in place: to its owners, or `everywhere` (see `PayloadReducer`)."""
        reducer = self.reducer
        self._see(bucket, partition, everywhere)
        operation = reducer.all_reduce if everywhere else reducer.reduce_scatter
        self._count_uncompressed(partition, everywhere)
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
        if alone or not self._transactional or self._plan.probe or self._compares():
            return None
        assert isinstance(reducer, PayloadReducer)
        return reducer

    def forget_step(self) -> None:
        """What the running step has written into memories was written in vain."""
        for store in self.stores.values():
            store.rollback()

    def start_early(self, bucket: Tensor, partition: Partition, scale: float, number: int) -> Pending:
        """`start` by the `early_reducer`, with messages from `number` on; `bucket` stays as it is."""
        reducer = self.early_reducer
        assert reducer is not None, "nothing may begin early in this step"
        self._count_uncompressed(partition, everywhere=False)
        return reducer.start_reduce_scatter(bucket, partition, scale, number)

    def start(self, bucket: Tensor, partition: Partition, scale: float) -> Pending:
        """Begin to reduce `bucket` to its owners; it may be overwritten."""
        if self._sampled():
            self.reduce(bucket, partition, scale, everywhere=False)
            own = partition.owned_by(self.reducer.group.rank())
            return Done(own, gather(bucket, own))
        self._see(bucket, partition, everywhere=False)
        self._count_uncompressed(partition, everywhere=False)
        return self.reducer.start_reduce_scatter(bucket, partition, scale)

    def _see(self, bucket: Tensor, partition: Partition, everywhere: bool) -> None:
        if self._plan.probe and self._prober is not None:
            self._prober.see(bucket, partition, self.reducer.group.rank(), everywhere)

    def _count_uncompressed(self, partition: Partition, everywhere: bool) -> None:
        if self.meter.timed:
            self.meter.bytes_raw += uncompressed_bytes(self.reducer, partition, everywhere)

    def _compares(self) -> bool:
        """Whether the running step, every `cosine_every`-th, compares one of its buckets with the truth."""
        every = self.config.monitor.cosine_every
        return every > 0 and (self.clock.step + 1) % every == 0 and not self.dense

    def _sampled(self) -> bool:
        """Whether to compare this bucket: the first one."""
        return self._compares() and self.meter.cosine is None

    def finish(self, finished: FinishedStep) -> bool:
        """Settle the memories, report, decide, and begin the next step; whether the last checkpoint is to be loaded."""
        self._settle(finished)
        step, step_ms = finished.step, self._reporter.step_ended()
        # A skipped step is shorter than others, and says nothing of them.
        means = self._watch.losses.next(step_ms if finished.applied else None) if self._watch is not None else Means()
        residuals = self._largest_residual(finished) if self.policy.wants_residuals(step) else None
        seen = Observation(step, finished.applied, finished.grad_norm, means.loss, residuals, means.step_ms)
        if self._reporter.due(step):
            if self.config.gradients.method == "none":
                self.meter.bytes_raw = self.meter.bytes_sent
            norm = functools.partial(self._residual_norm, finished)
            self._reporter.report(seen, finished.samples, self._plan, step_ms, norm)
        duties = self.policy.observe(seen)
        if self._plan.probe:
            self._adapt(finished, step_ms)
        if duties.check_residuals:
            self._check_residuals(finished)
        self.begin(step, finished.scale_after)
        return duties.load_checkpoint

    def _adapt(self, finished: FinishedStep, step_ms: float | None) -> None:
        """Choose by this step, unless it was skipped or its time is not known: the next one is measured then."""
        assert self._prober is not None
        if step_ms is None or not finished.applied:
            self._prober.forget()
            return
        waited = self.meter.milliseconds()["communicate"]
        self.policy.adapt(finished.step, self._prober.measure(self.reducer.group, waited / 1e3, step_ms / 1e3))
        # The measurement is part of no step.
        self._reporter.step_ended()

    def _settle(self, finished: FinishedStep) -> None:
        if self.prune_owned and finished.applied and not self.dense:
            self._prune()
        for store in self.stores.values():
            if finished.applied:
                store.commit()
            else:
                store.rollback()
            if finished.scale_after != finished.scale_before:
                store.scale(finished.scale_after / finished.scale_before)
        if finished.applied and self._forgets(finished.step):
            self._clear_residuals()

    def _check_residuals(self, finished: FinishedStep) -> None:
        """Clear the residuals on all ranks if those of one are damaged: what is wrong would come back with them."""
        largest = self._largest_residual(finished)
        if largest is not None and self.policy.damaged(finished.step, largest):
            self._clear_residuals()

    def _clear_residuals(self) -> None:
        for name in _RESIDUALS & self.stores.keys():
            self.stores[name].clear()

    def _largest_residual(self, finished: FinishedStep) -> float | None:
        """The largest residual norm of all ranks; inf where one is not finite. Collective."""
        norm = self._residual_norm(finished)
        return None if self._watch is None or norm is None else self._watch.largest(norm)

    def _prune(self) -> None:
        """Drop what other ranks own: the first step has shown it."""
        for name in OWNED & self.stores.keys():
            self.stores[name].prune()
        self.prune_owned = False

    def _forgets(self, step: int) -> bool:
        interval = getattr(getattr(self.config.gradients, "error_feedback", None), "reset_interval", None)
        return interval is not None and step % interval == 0

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
        for store in self.stores.values():
            store.clear()

    def begin(self, step: int, loss_scale: float) -> None:
        """Start optimizer step `step` (0-based), whose gradients carry the factor `loss_scale`."""
        self.clock.begin(step, loss_scale)
        self._plan = self.policy.begin(step)
        self.meter.reset(timed=self._plan.probe or self._reporter.due(step + 1))

    def _residual_norm(self, finished: FinishedStep) -> float | None:
        """L2 norm of what this rank left out; a momentum is none of it."""
        left = [store for name, store in self.stores.items() if name in _RESIDUALS]
        return math.sqrt(sum(store.square_norm() for store in left)) / finished.scale_after if left else None
