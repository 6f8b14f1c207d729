"""Run to diagnose, read from its files, and what rules need of it: medians and shares of its compressed steps."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepspeed_compress.config import CompressConfig, read_ds_config, with_preset
from deepspeed_compress.config.models import Parallelism
from deepspeed_compress.config.problems import STAGE
from deepspeed_compress.diagnostics import Diagnostic, at_steps
from deepspeed_compress.errors import DataError
from deepspeed_compress.monitor import STATISTICS
from deepspeed_compress.tools.doctor.patches import difference, with_gradients
from deepspeed_compress.tools.doctor.rule import Thresholds
from deepspeed_compress.tools.run_directory import Line, RunDirectory, drop_replaced, read_directory

Points = tuple[tuple[int, float], ...]
"""Optimizer steps with their values. A value is NaN if the loss was not finite."""


@dataclass(frozen=True)
class Run:
    """Run to diagnose, finished or not.

    Attributes:
        directory: Directory of the run.
        steps: Lines of compression.jsonl in order of steps.
        losses: Training losses, from the file that holds the most.
        held_out: Evaluation losses, from the file that holds the most.
        config: DeepSpeed configuration, or None if the run did not leave it.
    """

    directory: Path
    steps: tuple[Line, ...]
    events: tuple[Line, ...] | None = None
    """Events of the first island, whose ranks the figures describe. None if the run's version did not write events."""
    versions: tuple[Line, ...] = ()
    """Versions of the weights for rollout workers."""
    losses: Points = ()
    held_out: Points = ()
    step_times: tuple[float, ...] = ()
    """Milliseconds per step, from metrics.jsonl."""
    config: Mapping[str, Any] | None = None
    section: CompressConfig | None = None
    """Compression section of `config`. None if it has none, or none that this version accepts."""


def read_baseline(directory: Path) -> Run:
    """Read the run in `directory` that another one is compared with. It may be one without this package.

    Raises:
        DataError: `directory` does not exist, or holds neither losses nor times of steps.
    """
    run = _run(directory, _read(directory))
    if not (run.steps or run.losses or run.held_out or run.step_times):
        problem = "--baseline: holds neither losses nor times of steps"
        files = f"metrics.jsonl, {STATISTICS}, trainer_state.json"
        raise DataError(f"{directory}: {problem} ({files}); pass the output of a run")
    return run


def read_run(directory: Path, config: Path | None = None) -> Run:
    """Read the run in `directory`, with `config` in place of the configuration that it left, if given.

    Raises:
        DataError: `directory` does not exist or holds no statistics.
        ConfigError: `config` cannot be read.
    """
    found = _read(directory, config)
    if not found.statistics:
        what = f"{found.monitor}: holds no {STATISTICS} with measured steps"
        raise DataError(f"{what}; set monitor.path in the section and train again, or pass the directory that has it")
    return _run(directory, found)


def _read(directory: Path, config: Path | None = None) -> RunDirectory:
    if not directory.is_dir():
        raise DataError(f"{directory}: no such directory; pass the output directory of a run, or its monitor.path")
    return read_directory(directory, None if config is None else read_ds_config(config))


def _run(directory: Path, found: RunDirectory) -> Run:
    # Statistics have losses only with some settings, and never in the first step.
    measured = tuple(dropwhile(lambda line: line.get("loss") is None, found.statistics))
    section = None
    with suppress(ValidationError):
        section = CompressConfig.model_validate(with_preset(found.ds_config or {}))
    logged = (found.metrics, "train_loss"), (measured, "loss"), (found.trainer_log, "loss")
    return Run(
        directory,
        found.statistics,
        None if found.events is None else tuple(event for event in found.events if not event.get("island")),
        found.versions,
        max((_points(lines, key) for lines, key in logged), key=len),
        max(_points(found.metrics, "eval_loss"), _points(found.trainer_log, "eval_loss"), key=len),
        tuple(1e3 * line["step_time_s"] for line in found.metrics if line.get("step_time_s") is not None),
        found.ds_config,
        section,
    )


def _points(lines: Sequence[Line], key: str) -> Points:
    """Return the values of `key` by step. A null means "not finite" (NaN)."""
    found = ((int(line["step"]), line[key]) for line in drop_replaced(line for line in lines if key in line))
    return tuple((step, math.nan if value is None else float(value)) for step, value in found)


_OTHER_KINDS = ("bytes_pipeline", "bytes_tied", "bytes_tensor", "bytes_experts", "bytes_sequence", "bytes_islands")


@dataclass(frozen=True)
class Times:
    """Median milliseconds of a compressed step on the reporting rank.

    Attributes:
        step: Whole step.
        wait: Waiting for messages, without waiting for slower ranks.
        compress: Encoding.
        cost: Encoding and decoding.
    """

    step: float
    wait: float
    compress: float
    cost: float


@dataclass(frozen=True)
class Slowest:
    """Rank that is most often the slowest.

    Attributes:
        rank: The rank.
        share: Fraction of the steps in which it is the slowest.
        behind: Median time by which the slowest rank is behind the median rank, as a fraction of the step time.
        always: Whether `share` is large enough to regard the rank as slow throughout.
        lines: Measured steps in which ranks were compared.
    """

    rank: int
    share: float
    behind: float
    always: bool
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Case:
    """Run to diagnose, the baseline to compare it with, and the thresholds of the rules."""

    run: Run
    baseline: Run | None = None
    limits: Thresholds = field(default_factory=Thresholds)

    @cached_property
    def section(self) -> CompressConfig:
        """Return the section of the configuration, or the defaults if it is unknown."""
        return self.run.section or CompressConfig()

    @cached_property
    def compressed(self) -> tuple[Line, ...]:
        """Return the measured steps in which gradients were compressed."""
        return tuple(line for line in self.run.steps if line.get("method") != "none")

    @property
    def span(self) -> tuple[int, int]:
        """Return the first and last of the `compressed` steps, or of all measured steps if none was compressed."""
        lines = self.compressed or self.run.steps
        return lines[0]["step"], lines[-1]["step"]

    def values(self, key: str, among: tuple[Line, ...] | None = None) -> list[float]:
        """Return the known values of `key` in order of steps, by default among the `compressed` steps."""
        lines = self.compressed if among is None else among
        return [float(line[key]) for line in lines if line.get(key) is not None]

    def median(self, key: str, among: tuple[Line, ...] | None = None) -> float:
        """Return the median of `values`, or 0 if no value is known."""
        return statistics.median(self.values(key, among) or [0.0])

    @property
    def times(self) -> Times:
        """Return the median times of a compressed step, for rules with the need "times"."""
        assert self.known_times is not None, 'the rule lacks the need "times"'
        return self.known_times

    @cached_property
    def known_times(self) -> Times | None:
        """Return the median times of a compressed step, or None if they were not recorded."""
        usual = statistics.median(self.run.step_times) if self.run.step_times else None
        keys = ("compress_ms", "communicate_ms", "decompress_ms")
        timed = [line for line in self.compressed if all(line.get(key) is not None for key in keys)]
        known = [(line, float(step)) for line in timed if (step := line.get("step_ms") or usual)]
        if not known:
            return None
        middle: Callable[[Iterator[float]], float] = statistics.median
        return Times(
            middle(step for _, step in known),
            middle(self._wait(line) for line, _ in known),
            middle(line["compress_ms"] for line, _ in known),
            middle(line["compress_ms"] + line["decompress_ms"] for line, _ in known),
        )

    def _wait(self, line: Line) -> float:
        """Return the milliseconds spent in communication.

        Time spent waiting for slower ranks is subtracted if one rank is always the slowest or if ranks are late in
        turn.
        """
        slowest = self.slowest
        uneven = slowest is not None and (slowest.always or slowest.behind >= self.limits.noise)
        return max(0.0, float(line["communicate_ms"]) - (self._ahead.get(line["step"], 0.0) if uneven else 0.0))

    @cached_property
    def _ahead(self) -> Mapping[int, float]:
        """Return the milliseconds for which the slowest rank was busy longer than this one, by step.

        The busy times of all ranks in a step are reported with the measured step that follows it.
        """
        pairs = pairwise(self.run.steps)
        reported = [(line["step"], line.get("busy_ms"), after.get("busy_ms_max")) for line, after in pairs]
        return {step: slowest - own for step, own, slowest in reported if own is not None and slowest is not None}

    @cached_property
    def slowest(self) -> "Slowest | None":
        """Return the rank that is most often the slowest, or None if ranks were compared in too few steps."""
        keys = ("busy_ms_max", "busy_ms_median", "slowest_rank")
        timed = [line for line in self.run.steps if line.get("step_ms")]
        lines = [line for line in timed if all(line.get(key) is not None for key in keys)]
        if len(lines) < self.limits.lines:
            return None
        counts = Counter(int(line["slowest_rank"]) for line in lines)
        rank, count = counts.most_common(1)[0]
        behind = statistics.median((line["busy_ms_max"] - line["busy_ms_median"]) / line["step_ms"] for line in lines)
        always = count >= self.limits.same_rank * len(lines)
        return Slowest(rank, count / len(lines), behind, always, tuple(lines))

    @property
    def publishes(self) -> bool:
        """Return True if the section publishes weights for rollout workers, or is not known."""
        return self.run.section is None or self.run.section.rollout is not None

    @property
    def alone(self) -> bool:
        """Return True if the configuration is known and has no islands."""
        return self.run.section is not None and self.run.section.islands is None

    @property
    def weights_compressed(self) -> bool:
        return self.section.weights.method != "none"

    @property
    def mostly_frozen(self) -> bool:
        """Return True if ZeRO 3 gathers so much more than gradients have that most weights are not trained."""
        gathered = self.median("bytes_weights") + self.median("bytes_weights_saved")
        return self.stage == 3 and gathered > self.limits.gathers * self.median("bytes_uncompressed") > 0

    @property
    def traffic(self) -> dict[str, float]:
        """Return the median bytes per step by kind of traffic. Kinds with a median of zero are left out."""
        kinds = ("bytes_sent", "bytes_weights", *_OTHER_KINDS)
        return {kind: size for kind in kinds if (size := self.median(kind))}

    @property
    def waited_bytes(self) -> float:
        """Return the median bytes per step that are sent within the time measured as `communicate_ms`."""
        kinds = [kind for kind in self.compressed_activations if kind != "bytes_pipeline"]
        return sum(map(self.median, ["bytes_sent", *kinds, *(["bytes_weights"] if self.weights_compressed else [])]))

    @property
    def compressed_activations(self) -> list[str]:
        """Return the kinds of bytes of activations that are compressed, whose encoding is in the measured times."""
        activations = self.section.activations
        if activations is None:
            return []
        kinds = {
            "bytes_tensor": activations.tensor,
            "bytes_pipeline": activations.pipeline,
            "bytes_sequence": activations.sequence,
        }
        return [name for name, settings in kinds.items() if settings is not None and settings.bits is not None]

    @property
    def overlaps(self) -> bool:
        """Return True if messages are sent during backward.

        The waiting time then does not show how long a larger message would take.
        """
        zero = (self.run.config or {}).get("zero_optimization")
        written = zero.get("overlap_comm") if isinstance(zero, Mapping) else None
        return self.stage == 3 or written is not False

    @property
    def step_ms(self) -> float | None:
        """Return the median milliseconds of all steps, including uncompressed ones, or None if unknown."""
        known = self.values("step_ms", self.run.steps) or self.run.step_times
        return statistics.median(known) if known else None

    @cached_property
    def stage(self) -> int:
        """Return the ZeRO stage, or 0 if the configuration is unknown."""
        section, config = self.run.section, self.run.config
        if section is None or config is None:
            return 0
        return STAGE.effective(config, section.parallelism or Parallelism())

    @property
    def encoded_bytes(self) -> float:
        """Return a lower bound for the bytes of gradients, counted as fp32, that are encoded per step."""
        parts = ((self.run.config or {}).get(key) for key in ("bf16", "fp16"))
        # Bytes per element of a gradient as DeepSpeed sends it.
        element = 2 if any(isinstance(part, Mapping) and part.get("enabled") for part in parts) else 4
        return 2 * self.median("bytes_uncompressed") / element

    def patch(self, change: Callable[..., Mapping[str, Any] | None], *arguments: object) -> dict[str, Any] | None:
        """Return the merge patch for what `change(config, *arguments)` does, or None if that is not known."""
        config = self.run.config
        wanted = None if config is None else change(config, *arguments)
        return None if wanted is None or config is None else difference(config, wanted)

    def gradients_patch(self, change: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the merge patch for a `change` of the gradient settings, or None without one or without a section."""
        return None if change is None or self.run.section is None else self.patch(with_gradients, change)

    def finding(
        self,
        what: str,
        remedy: str,
        patch: Mapping[str, Any] | None = None,
        steps: tuple[int, int] | None = None,
        **more: Any,
    ) -> Diagnostic:
        """Return a finding about `steps`, by default those of `span`. `more` are further fields of `Diagnostic`."""
        return Diagnostic(at_steps(*(steps or self.span)), what, remedy, patch=patch, **more)

    def lacks(self, need: str) -> bool:
        """Return True if `need` was not recorded: a key of `NEEDS`, or a field of compression.jsonl ("a|b": either)."""
        return not any(
            NEEDS[option][1](self) if option in NEEDS else len(self.values(option, self.run.steps)) >= self.limits.lines
            for option in need.split("|")
        )


SAMPLES = 4
"""Minimum number of cosines for a median. Each costs an uncompressed message, so few are recorded."""

NEEDS: Mapping[str, tuple[str, Callable[[Case], bool]]] = {
    "config": ("ds_config.json (or --config) with a valid section", lambda case: case.run.section is not None),
    "events": ("events.jsonl", lambda case: case.run.events is not None),
    "losses": ("losses", lambda case: len(case.run.losses) >= case.limits.lines),
    "baseline": ("--baseline", lambda case: case.baseline is not None),
    "cosine": ("cosine", lambda case: len(case.values("cosine")) >= SAMPLES),
    "islands": (
        "islands_cosine",
        lambda case: case.alone or len(case.values("islands_cosine", case.run.steps)) >= SAMPLES,
    ),
    "lag": (
        "rollout_lag (engine.rollout.report_lag)",
        lambda case: not case.publishes or len(case.values("rollout_lag", case.run.versions)) >= case.limits.lines,
    ),
    "ranks": ("slowest_rank and step_ms", lambda case: case.slowest is not None),
    "times": (
        "step_ms of compressed steps",
        lambda case: case.known_times is not None and len(case.compressed) >= case.limits.lines,
    ),
}
"""Requirements of rules other than fields of compression.jsonl: the text shown to users and the test for each."""
