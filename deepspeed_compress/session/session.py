"""Compression of one engine: the reducer that is in force, and the residuals and momenta that steps update."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.payload import PayloadReducer, PendingMeans
from deepspeed_compress.collectives.probes import cosine_with_truth, true_sum
from deepspeed_compress.collectives.reducer import Pending, Reduced, Reducer
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import gather
from deepspeed_compress.config import CompressedGradients, PowerSGDGradients, WeightsConfig
from deepspeed_compress.monitor import Event, StepStatistics
from deepspeed_compress.policy import StepPlan
from deepspeed_compress.session.exact import ExactWeights
from deepspeed_compress.session.observer import PolicyInputs
from deepspeed_compress.session.parts import Parts
from deepspeed_compress.session.protocols import BackgroundCheckpoints, IslandExchanges, StepFollower
from deepspeed_compress.session.residual_state import FinishedStep
from deepspeed_compress.session.step_end import StepEnd


class Session:
    """Compression of one engine, available as `engine.compression` for the life of the engine.

    DeepSpeed's seams call `reduce` or `start` for every bucket, and `finish` when an optimizer step is over. The
    settings in force change only in `finish` and `begin`. All ranks call the same methods in the same order.

    Args:
        parts: the parts that exist before the session.
        inputs: figures of all ranks for the policy; None if the policy observes nothing.
        exact: updater that makes compressed weights exact on every rank; None if weights never lag behind the fp32
            master weights.
        saving: checkpoints that are written in the background; None if saving blocks training.
        islands: exchanges with other islands; None if all ranks train as one.
        slowest: returns the largest value of all ranks, from this rank's; needed if the policy compares step times.

    Examples:
        In a training script:

        >>> engine, *_ = deepspeed_compress.initialize(model=model, config="ds_config.json")
        >>> engine.compression.subscribe(lambda figures: print(figures.step, figures.ratio))
        >>> engine.compression.report_metric(validation_loss)
    """

    def __init__(
        self,
        parts: Parts,
        inputs: PolicyInputs | None = None,
        exact: ExactWeights | None = None,
        saving: BackgroundCheckpoints | None = None,
        islands: IslandExchanges | None = None,
        slowest: Callable[[float], float] | None = None,
    ) -> None:
        self.config = parts.config
        self.parameters = None if parts.reductions is None else parts.parameters
        """The model's parameters as reducers know them; None if reduction is left to the engine."""
        self.policy = parts.policy
        self.meter = parts.run.meter
        self.clock = parts.run.clock
        self.pace = parts.run.pace
        self.patches = parts.patches
        self.journal = parts.records.journal
        self.residuals = parts.residuals
        """Residuals and momenta."""
        self.exact = exact
        self.saving = saving
        self.islands = islands
        self.saved: list[Path] = []
        """Directories of the checkpoints that this run has saved, oldest first."""
        self.resumed: Mapping[str, Any] | None = None
        """Client state of the checkpoint from which the engine resumed when it was made; None for a new run."""
        self._settings = parts.settings
        self._scale: float | None = None
        """Scale of the sums that all ranks receive, from the latest reduction."""
        self._reductions = parts.reductions
        self._records = parts.records
        self._inputs = inputs
        self._discards: list[Callable[[], None]] = []
        self._followers: list[StepFollower] = []
        self._step_end = StepEnd(parts, inputs, slowest, self._followers)

    @property
    def events(self) -> Sequence[Event]:
        """Return the decisions in this process so far."""
        return self._records.log.events

    @property
    def stores(self) -> Mapping[str, Residuals]:
        """Return residuals and momenta, by what they hold ("gradients", "means", "velocity" ...)."""
        return self.residuals.by_name

    @property
    def reducer(self) -> Reducer:
        """Return the reducer of the running step for the parameters that all data-parallel ranks have."""
        return self._settings.reducers.every[0]

    def chosen_reducer(self, step: int, partition: Partition) -> Reducer:
        """Return the reducer of a bucket for the configured settings in step `step` (0-based), whatever is in force."""
        gradients = self.config.gradients
        assert self._reductions is not None
        assert isinstance(gradients, CompressedGradients)
        return self._reductions.at(gradients, step).of(partition)

    @property
    def settings(self) -> str:
        """Return the settings in force in the running step in short form: "blockwise bits=4"."""
        return self._plan.text

    @property
    def dense(self) -> bool:
        """Return True if the running step sends everything uncompressed."""
        return self._plan.dense

    @property
    def alone(self) -> bool:
        """Return True if the engine itself reduces gradients in the running step, uncompressed."""
        return self._plan.alone or self._reductions is None

    @property
    def weights(self) -> WeightsConfig | None:
        """Return the weight settings of the running step; None if the engine itself gathers weights."""
        return self._settings.weights

    @property
    def _plan(self) -> StepPlan:
        return self._settings.plan

    @property
    def reports(self) -> bool:
        """Return True if the running step is measured for subscribers: in all islands or in none."""
        return self._records.reporter.due(self.clock.step + 1)

    @property
    def synchronises(self) -> bool:
        """Return True if the running step ends with exact weights on all ranks."""
        return self._plan.sync

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
        self._records.reporter.sinks.append(sink)

    def record(self, event: Event) -> None:
        """Write `event` to the log of decisions of the run."""
        self._records.log.record(event)

    def compare_again(self) -> int:
        """Repeat the comparison of `auto`, for instance because the network has changed.

        Call it on all ranks, between optimizer steps.

        Returns:
            The number of steps until the next choice is in force; 0 without `auto`.
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
        if self._inputs is not None:
            self._inputs.losses.report(value)

    def reduce(self, bucket: Tensor, partition: Partition, scale: float, everywhere: bool) -> None:
        """Reduce `bucket` in place: to its owners, or to all ranks if `everywhere` (see `PayloadReducer`)."""
        reducer = self._settings.reducers.of(partition)
        self._measure(reducer, bucket, partition, everywhere)
        self._scale = scale
        truth = true_sum(reducer.group, bucket) if self._is_compared(reducer) else None
        (reducer.all_reduce if everywhere else reducer.reduce_scatter)(bucket, partition, scale)
        if truth is not None:
            own = partition.owned_by(reducer.group.rank())
            self.meter.cosine = cosine_with_truth(reducer.group, bucket, truth, own)

    @property
    def early_reducer(self) -> PayloadReducer | None:
        """Return the running step's reducer if reductions may begin before they are certain to be needed.

        Such a reducer leaves buckets unchanged, and its updates of error-feedback buffers can be rolled back. None with
        one rank, if updates cannot be rolled back, and in steps that probe candidates or compare with the true sum.
        """
        reducer = self.reducer
        if not isinstance(reducer, PayloadReducer) or reducer.group.size() == 1:
            return None
        may_begin = self.residuals.transactional and not self._plan.probe and not self._compares()
        return reducer if may_begin else None

    def forget_step(self) -> None:
        """Roll back what the running step has written into error-feedback buffers and momenta."""
        self.residuals.rollback()

    def on_interruption(self, discard: Callable[[], None]) -> Callable[[], None]:
        """Have `discard_unfinished` call `discard`, which drops reductions that were begun and never finished.

        Returns:
            A function that undoes this.
        """
        self._discards.append(discard)
        return partial(self._discards.remove, discard)

    def on_step(self, follower: StepFollower) -> None:
        """Have `follower` prepare for every step from now on."""
        self._followers.append(follower)

    def discard_unfinished(self) -> None:
        """Drop what a failed backward pass has sent, so that none of it reaches the state that is loaded next.

        Collective.
        """
        for discard in self._discards:
            discard()

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
        self._scale = scale
        begin = reducer.start_all_reduce if everywhere else reducer.start_reduce_scatter
        return begin(bucket, partition, scale, number)

    def start(self, bucket: Tensor, partition: Partition, scale: float) -> Pending:
        """Begin to reduce `bucket` to its owners; it may be overwritten."""
        reducer = self._settings.reducers.of(partition)
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
        reducer = self._settings.reducers.of(partition)
        if not isinstance(reducer, PayloadReducer) or reducer.group.size() == 1 or self._is_compared(reducer):
            self.reduce(bucket, partition, scale, everywhere=True)
            return None
        self._measure(reducer, bucket, partition, everywhere=True)
        self._scale = scale
        return reducer.start_all_reduce(bucket, partition, scale)

    def _measure(self, reducer: Reducer, bucket: Tensor, partition: Partition, everywhere: bool) -> None:
        """Let an adaptive policy measure its candidates on `bucket`, and count the bytes that are sent uncompressed."""
        if self._plan.probe and self._inputs is not None and self._inputs.prober is not None:
            self._inputs.prober.see(bucket, partition, reducer.group.rank(), everywhere)
        if self.meter.timed:
            # Those of parameters that are excluded, small, or chosen by an override.
            transfers = reducer.transfers(partition, everywhere)
            self.meter.bytes_raw += sum(one.uncompressed_bytes for one in transfers)

    def _compares(self) -> bool:
        """Return True if the running step, every `cosine_every`-th, compares a bucket with the true sum."""
        every = self.config.monitor.cosine_every
        return every > 0 and (self.clock.step + 1) % every == 0 and not self.dense

    def _is_compared(self, reducer: Reducer) -> bool:
        """Return True if its next bucket is compared: the first one of all ranks in a step that compares."""
        return self._compares() and self.meter.cosine is None and reducer is self.reducer

    def finish(self, finished: FinishedStep) -> bool:
        """Finish a step: update residuals, report, decide, and begin the next step.

        Returns True if the checkpoint saved last is to be loaded.
        """
        actions = self._step_end.finish(finished, self.alone)
        self.begin(finished.step, finished.scale_after)
        return actions.load_checkpoint

    def exchange_with_islands(self, step: int) -> None:
        """Exchange with other islands after optimizer step `step` (1-based), if an exchange is due."""
        if self.islands is None:
            return
        self.islands.step_ended(step)
        self._step_end.exchanged()

    def decisions(self) -> dict[str, Any]:
        """Return the state that the next decisions depend on, as JSON values; equal on all ranks."""
        return {
            "run": self.journal.part.id,
            "policy": self.policy.saved(),
            "losses": self._inputs.losses.saved() if self._inputs is not None else None,
        }

    def load_decisions(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `decisions` returned; call `begin` afterwards."""
        self.journal.adopt(saved.get("run"))
        self.policy.load(saved["policy"])
        if self._inputs is not None:
            self._inputs.losses.load(saved["losses"])

    def checkpoint_saved(self, directory: Path) -> None:
        """Have `guard.rollback` load the checkpoint in the tag directory `directory` from now on."""
        self.saved = [*(one for one in self.saved if one != directory), directory]

    @property
    def last_saved(self) -> Path | None:
        """Return the directory of the checkpoint that this run saved last; None if it has saved none."""
        return self.saved[-1] if self.saved else None

    def training_resumed(self, client_state: Mapping[str, Any]) -> None:
        """Note that the engine, when it was made, has loaded a checkpoint with `client_state`."""
        self.resumed = client_state

    def reset(self) -> None:
        """Forget everything that is kept between steps."""
        self.residuals.clear()

    def begin(self, step: int, loss_scale: float) -> None:
        """Start optimizer step `step` (0-based), whose gradients carry the factor `loss_scale`."""
        self.clock.begin(step, loss_scale)
        self._settings.begin(step)
        for follower in self._followers:
            follower.follow(self.alone)
        if self._plan.changed and isinstance(self._plan.settings, PowerSGDGradients) and self._scale is not None:
            self.residuals.hand_over_means(self._scale)
        self._step_end.begin()
        self.meter.reset(timed=self._plan.probe or self._records.reporter.due(step + 1))
