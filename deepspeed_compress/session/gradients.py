"""Settings in force in the running optimizer step, and the reductions of its gradient buckets."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.payload import PayloadReducer, PendingMeans
from deepspeed_compress.collectives.probes import cosine_with_truth, true_sum
from deepspeed_compress.collectives.reducer import Pending, Reduced, Reducer, Run
from deepspeed_compress.collectives.reduction import GroupedReducers, GroupedReductions
from deepspeed_compress.compression.segments import gather
from deepspeed_compress.config import CompressConfig, CompressedGradients, WeightsConfig
from deepspeed_compress.config.methods import NoCompression
from deepspeed_compress.errors import StateError
from deepspeed_compress.policy.decider import StepPlan
from deepspeed_compress.policy.policy import Policy
from deepspeed_compress.session.probing import Prober
from deepspeed_compress.session.residual_state import ResidualState


class GradientReductions:
    """Settings in force, which change only in `begin`, and reductions of gradient buckets with them.

    Seams call `reduce` or `start` for every bucket. All ranks call the same methods in the same order.

    Args:
        config: the section.
        policy: decides at the beginning of every step.
        reductions: the reducers for each choice of gradient settings; None for method "none", which leaves reduction to
            the engine.
        residuals: residuals and momenta.
        run: clock, meter, seed and pace.
        prober: measurements of candidates; None if the policy does not adapt.
    """

    def __init__(
        self,
        config: CompressConfig,
        policy: Policy,
        reductions: GroupedReductions | None,
        residuals: ResidualState,
        run: Run,
        prober: Prober | None,
    ) -> None:
        self.plan = StepPlan(config.gradients, config.weights)
        """Plan of the running step."""
        self.scale: float | None = None
        """Scale of the sums that all ranks receive, from the latest reduction."""
        self._config, self._policy, self._reductions, self._residuals = config, policy, reductions, residuals
        self._clock, self._meter, self._prober = run.clock, run.meter, prober
        self._reducers: GroupedReducers | None = None
        self._discards: list[Callable[[], None]] = []

    @property
    def _in_force(self) -> GroupedReducers:
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

    @property
    def reducer(self) -> Reducer:
        """Return the reducer of the running step for the parameters that all data-parallel ranks have."""
        return self._in_force.every[0]

    def chosen_reducer(self, step: int, partition: Partition) -> Reducer:
        """Return the reducer of a bucket for the configured settings in step `step` (0-based), whatever is in force."""
        gradients = self._config.gradients
        assert self._reductions is not None
        assert isinstance(gradients, CompressedGradients)
        return self._reductions.at(gradients, step).of(partition)

    def reduce(self, bucket: Tensor, partition: Partition, scale: float, everywhere: bool) -> None:
        """Reduce `bucket` in place: to its owners, or to all ranks if `everywhere` (see `PayloadReducer`)."""
        reducer = self._in_force.of(partition)
        self._measure(reducer, bucket, partition, everywhere)
        self.scale = scale
        truth = true_sum(reducer.group, bucket) if self._is_compared(reducer) else None
        (reducer.all_reduce if everywhere else reducer.reduce_scatter)(bucket, partition, scale)
        if truth is not None:
            own = partition.owned_by(reducer.group.rank())
            self._meter.cosine = cosine_with_truth(reducer.group, bucket, truth, own)

    def start(self, bucket: Tensor, partition: Partition, scale: float) -> Pending:
        """Begin to reduce `bucket` to its owners; it may be overwritten."""
        reducer = self._in_force.of(partition)
        if self._is_compared(reducer):
            self.reduce(bucket, partition, scale, everywhere=False)
            own = partition.owned_by(reducer.group.rank())
            return Reduced(own, gather(bucket, own))
        self._measure(reducer, bucket, partition, everywhere=False)
        return reducer.start_reduce_scatter(bucket, partition, scale)

    def start_everywhere(self, bucket: Tensor, partition: Partition, scale: float) -> PendingMeans | None:
        """Begin to reduce `bucket` on all ranks.

        Returns None if the reduction cannot be deferred; it is then done already.
        """
        reducer = self._in_force.of(partition)
        if not isinstance(reducer, PayloadReducer) or reducer.group.size() == 1 or self._is_compared(reducer):
            self.reduce(bucket, partition, scale, everywhere=True)
            return None
        self._measure(reducer, bucket, partition, everywhere=True)
        self.scale = scale
        return reducer.start_all_reduce(bucket, partition, scale)

    @property
    def early_reducer(self) -> PayloadReducer | None:
        """Return the running step's reducer if reductions may begin before they are certain to be needed.

        Such a reducer leaves buckets unchanged, and its updates of error-feedback buffers can be rolled back. None with
        one rank, if updates cannot be rolled back, and in steps that probe candidates or compare with the true sum.
        """
        reducer = self.reducer
        if not isinstance(reducer, PayloadReducer) or reducer.group.size() == 1:
            return None
        may_begin = self._residuals.stores.transactional and not self.plan.probe and not self._compares()
        return reducer if may_begin else None

    def start_early(
        self, bucket: Tensor, partition: Partition, scale: float, number: int, everywhere: bool
    ) -> Pending | PendingMeans:
        """Begin a reduction with the `early_reducer`, which leaves `bucket` unchanged.

        Args:
            bucket: the flat gradients.
            partition: the owners of the bucket's segments.
            scale: factor of the sum.
            number: number of the first message.
            everywhere: reduce to all ranks instead of to the owners.
        """
        reducer = self.early_reducer
        assert reducer is not None, "nothing may begin early in this step"
        self._measure(reducer, bucket, partition, everywhere)
        self.scale = scale
        begin = reducer.start_all_reduce if everywhere else reducer.start_reduce_scatter
        return begin(bucket, partition, scale, number)

    def on_interruption(self, discard: Callable[[], None]) -> Callable[[], None]:
        """Have `discard_unfinished` call `discard`, which drops reductions that were begun and never finished.

        Returns:
            A function that undoes this.
        """
        self._discards.append(discard)
        return partial(self._discards.remove, discard)

    def discard_unfinished(self) -> None:
        """Drop what a failed backward pass has sent, so that none of it reaches the state that is loaded next.

        Collective.
        """
        for discard in self._discards:
            discard()

    def _measure(self, reducer: Reducer, bucket: Tensor, partition: Partition, everywhere: bool) -> None:
        """Let an adaptive policy measure its candidates on `bucket`, and count the bytes that are sent uncompressed."""
        if self.plan.probe and self._prober is not None:
            self._prober.see(bucket, partition, reducer.group.rank(), everywhere)
        if self._meter.timed:
            # Those of parameters that are excluded, small, or chosen by an override.
            transfers = reducer.transfers(partition, everywhere)
            self._meter.bytes_raw += sum(transfer.uncompressed_bytes for transfer in transfers)

    def _compares(self) -> bool:
        """Return True if the running step, every `cosine_every`-th, compares a bucket with the true sum."""
        every = self._config.monitor.cosine_every
        return every > 0 and (self._clock.step + 1) % every == 0 and not self.plan.dense

    def _is_compared(self, reducer: Reducer) -> bool:
        """Return True if its next bucket is compared: the first one of all ranks in a step that compares."""
        return self._compares() and self._meter.cosine is None and reducer is self.reducer


def discard(pending: Sequence[Pending], group: ProcessGroup) -> None:
    """Wait for reductions whose sums are not needed any more, so that no later message is mistaken for one of theirs.

    Collective.

    Raises:
        StateError: on all ranks of `group`, if they have begun different numbers of reductions.
    """
    begun = gather_objects(len(pending), group)
    if min(begun) != max(begun):
        raise StateError(
            f"backward failed at different points: ranks have started {begun} reductions, so some ranks wait "
            "for others that never started theirs (allowed: the same number on all ranks); restart the job"
        )
    for one in pending:
        one.finish(torch.zeros(sum(segment.numel for segment in one.own)))
