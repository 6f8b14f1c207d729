"""Compression of one engine, from step to step: the settings in force, residuals, momenta, and decisions."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.config import PowerSGDGradients, WeightsConfig
from deepspeed_compress.monitor import Event, StepStatistics
from deepspeed_compress.policy import StepPlan
from deepspeed_compress.session.exact import ExactWeights
from deepspeed_compress.session.gradients import GradientReductions
from deepspeed_compress.session.observer import LargestOfAll, PolicyInputs, StepWatch
from deepspeed_compress.session.parts import Parts
from deepspeed_compress.session.protocols import BackgroundCheckpoints, IslandExchanges, StepFollower
from deepspeed_compress.session.residual_state import FinishedStep
from deepspeed_compress.session.step_end import StepEnd


class Session:
    """Compression of one engine, available as `engine.compression` for the life of the engine.

    Seams reduce every bucket with `gradients`, and call `finish` when an optimizer step is over. The settings in force
    change only in `finish` and `begin`. All ranks call the same methods in the same order.

    Args:
        parts: the parts that exist before the session.
        inputs: figures of all ranks for the policy; None if the policy observes nothing.
        exact: updater that makes compressed weights exact on every rank; None if weights never lag behind the fp32
            master weights.
        saving: checkpoints that are written in the background; None if saving blocks training.
        islands: exchanges with other islands; None if all ranks train as one.
        largest: see `PolicyInputs`; needed if the policy compares step times.
        watch: stopwatch of the steps, in the same case.

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
        largest: LargestOfAll | None = None,
        watch: StepWatch | None = None,
    ) -> None:
        self.config = parts.config
        self.parameters = None if parts.reductions is None else parts.parameters
        """The model's parameters as reducers know them; None if reduction is left to the engine."""
        self.gradients = GradientReductions(parts, inputs)
        """Reductions of gradient buckets."""
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
        self._records = parts.records
        self._inputs = inputs
        self._followers: list[StepFollower] = []
        self._exchange_ms = 0.0
        """Milliseconds that the running step, if it is measured, has waited for other islands."""
        self.watch = watch
        self._step_end = StepEnd(parts, inputs, largest, watch, self._followers)

    @property
    def events(self) -> Sequence[Event]:
        """Return the decisions in this process so far."""
        return self._records.log.events

    @property
    def stores(self) -> Mapping[str, Residuals]:
        """Return residuals and momenta, by what they hold ("gradients", "means", "velocity" ...)."""
        return self.residuals.by_name

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
        return self._plan.alone or self.parameters is None

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
        if self._inputs is not None:
            self._inputs.losses.report(value)

    def on_step(self, follower: StepFollower) -> None:
        """Have `follower` prepare for every step from now on."""
        self._followers.append(follower)

    def finish(self, finished: FinishedStep) -> bool:
        """Finish a step: update residuals, report, decide, and begin the next step.

        Returns True if the checkpoint saved last is to be loaded.
        """
        actions = self._step_end.finish(finished, self.alone, self._exchange_ms)
        self.begin(finished.step, finished.scale_after)
        return actions.load_checkpoint

    def exchange_with_islands(self, step: int) -> None:
        """Exchange with other islands after optimizer step `step` (1-based), if an exchange is due."""
        if self.islands is None:
            return
        self.islands.step_ended(step)
        if self._plan.probe:
            # The meter has begun the next step, whose gradients have not been waited for yet.
            self._exchange_ms = self.meter.milliseconds()["communicate"]

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
        scale = self.gradients.scale
        if self._plan.changed and isinstance(self._plan.settings, PowerSGDGradients) and scale is not None:
            self.residuals.hand_over_means(scale)
        self._exchange_ms = 0.0
        self.meter.reset(timed=self._plan.probe or self._records.reporter.due(step + 1))
