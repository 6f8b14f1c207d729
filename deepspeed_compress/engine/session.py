"""Compression of one engine: which reducer is in force, what a finished step does to the state, what is reported."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from deepspeed_compress.buckets import Partition, gather
from deepspeed_compress.build import Reduction
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.engine.parallel import Sizes, Survey
from deepspeed_compress.engine.uncompressed import uncompressed_bytes
from deepspeed_compress.monitor import Meter, StatisticsWriter, StepStatistics
from deepspeed_compress.policy import DenseWarmUp
from deepspeed_compress.reducers import Done, Pending, Reducer, StepClock, cosine_with_truth, true_sum
from deepspeed_compress.residuals import Residuals
from deepspeed_compress.state import OWNED

__all__ = ["FinishedStep", "Session"]

_RESIDUALS = frozenset({"gradients", "means", "node", "node_means"})
"""Memories of what was left out; the others are momenta, factors, and parts still to be handed on."""


@dataclass(frozen=True)
class FinishedStep:
    """What DeepSpeed did with an optimizer step: `applied` is False when it was skipped for an overflow.

    `step` and `samples` count the finished one. The loss scales are 1.0 where there is none.
    """

    step: int
    samples: int
    applied: bool
    scale_before: float
    scale_after: float


class Session:
    """Lives as long as the engine, as `engine.compression`.

    `reduction` is None for method "none". `survey` gives the rank whose bytes are reported and those bytes, from the
    bytes of this one; None on ranks that do not report.
    """

    def __init__(
        self,
        config: CompressConfig,
        reduction: Reduction | None,
        clock: StepClock,
        meter: Meter,
        writer: StatisticsWriter | None,
        survey: Survey = lambda sizes: (0, sizes),
    ) -> None:
        self.config = config
        self.meter = meter
        self.clock = clock
        self.stores: Mapping[str, Residuals] = reduction.stores if reduction else MappingProxyType({})
        self.prune_owned = False
        """Set after loading the state of another number of ranks: memories of all owners are here."""
        self._reduction = reduction
        self._warmup = DenseWarmUp(config.schedule.warmup_steps)
        self._sinks: list[Callable[[StepStatistics], None]] = (
            [writer.write] if writer is not None and writer.active else []
        )
        self._survey = survey

    @property
    def reducer(self) -> Reducer:
        """The reducer of the running step."""
        assert self._reduction is not None, 'method "none" leaves reduction to DeepSpeed'
        return self._reduction.plain if self.dense else self._reduction.compressed

    @property
    def dense(self) -> bool:
        """Whether the running step sends everything uncompressed."""
        return self._warmup.dense(self.clock.step)

    @property
    def method(self) -> str:
        """The method in force."""
        return "none" if self.dense else self.config.gradients.method

    def subscribe(self, sink: Callable[[StepStatistics], None]) -> None:
        """From now on `sink` gets the statistics of measured steps, on the ranks that report. Call it on all ranks."""
        self._sinks.append(sink)

    def reduce(self, bucket: Tensor, partition: Partition, scale: float, everywhere: bool) -> None:
        """Reduce `bucket` in place: to its owners, or `everywhere` (see `PayloadReducer`)."""
        reducer = self.reducer
        operation = reducer.all_reduce if everywhere else reducer.reduce_scatter
        self._count_uncompressed(partition, everywhere)
        truth = true_sum(reducer.group, bucket) if self._sampled() else None
        operation(bucket, partition, scale)
        if truth is not None:
            own = partition.owned_by(reducer.group.rank())
            self.meter.cosine = cosine_with_truth(reducer.group, bucket, truth, own)

    def start(self, bucket: Tensor, partition: Partition, scale: float) -> Pending:
        """Begin to reduce `bucket` to its owners; it may be overwritten."""
        if self._sampled():
            self.reduce(bucket, partition, scale, everywhere=False)
            own = partition.owned_by(self.reducer.group.rank())
            return Done(own, gather(bucket, own))
        self._count_uncompressed(partition, everywhere=False)
        return self.reducer.start_reduce_scatter(bucket, partition, scale)

    def _count_uncompressed(self, partition: Partition, everywhere: bool) -> None:
        if self.meter.timed:
            self.meter.bytes_raw += uncompressed_bytes(self.reducer, partition, everywhere)

    def _sampled(self) -> bool:
        """Whether to compare this bucket: the first one of every `cosine_every`-th step."""
        every = self.config.monitor.cosine_every
        return every > 0 and (self.clock.step + 1) % every == 0 and self.meter.cosine is None and not self.dense

    def finish(self, finished: FinishedStep) -> None:
        """Settle the memories, report, and begin the next step."""
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
            for name in _RESIDUALS & self.stores.keys():
                self.stores[name].clear()
        if self._due(finished.step) and self._sinks:
            self._report(finished)
        self.begin(finished.step, finished.scale_after)

    def _prune(self) -> None:
        """Drop what other ranks own: the first step has shown it."""
        for name in OWNED & self.stores.keys():
            self.stores[name].prune()
        self.prune_owned = False

    def _forgets(self, step: int) -> bool:
        interval = getattr(getattr(self.config.gradients, "error_feedback", None), "reset_interval", None)
        return interval is not None and step % interval == 0

    def reset(self) -> None:
        """Forget everything that is kept between steps."""
        for store in self.stores.values():
            store.clear()

    def begin(self, step: int, loss_scale: float) -> None:
        """Start optimizer step `step` (0-based), whose gradients carry the factor `loss_scale`."""
        self.clock.begin(step, loss_scale)
        self.meter.reset(timed=self._due(step + 1))

    def _due(self, step: int) -> bool:
        return step % self.config.monitor.every == 0

    def _report(self, finished: FinishedStep) -> None:
        if self._reduction is None:
            self.meter.bytes_raw = self.meter.bytes_sent
        found = self._survey(self.meter.sizes())
        if found is not None:
            statistics = self._statistics(finished, *found)
            for sink in self._sinks:
                sink(statistics)

    def _statistics(self, finished: FinishedStep, rank: int, sizes: Sizes) -> StepStatistics:
        """The figures of the step, before `finish` has begun the next one. `sizes`: of `rank`."""
        times, sent = self.meter.milliseconds(), sizes["bytes_sent"]
        return StepStatistics(
            step=finished.step,
            samples=finished.samples,
            method=self.method,
            rank=rank,
            **sizes,
            ratio=sizes["bytes_uncompressed"] / sent if sent else None,
            compress_ms=times["compress"],
            communicate_ms=times["communicate"],
            decompress_ms=times["decompress"],
            residual_norm=self._residual_norm(finished.scale_after),
            cosine=self.meter.cosine,
        )

    def _residual_norm(self, loss_scale: float) -> float | None:
        """Of what was left out; a momentum is none of it."""
        left = [store for name, store in self.stores.items() if name in _RESIDUALS]
        return math.sqrt(sum(store.square_norm() for store in left)) / loss_scale if left else None
