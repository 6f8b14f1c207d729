"""A run as rules see it: medians and shares of what was measured while compression was in force."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec

from deepspeed_compress.config import Parallelism
from deepspeed_compress.config.native import STAGE
from deepspeed_compress.tools.doctor.patches import difference
from deepspeed_compress.tools.doctor.run import Line, Run
from deepspeed_compress.tools.doctor.thresholds import Thresholds

__all__ = ["NEEDS", "OTHER_KINDS", "SAMPLES", "Case", "Slowest", "Times"]

P = ParamSpec("P")

OTHER_KINDS = ("bytes_pipeline", "bytes_tied", "bytes_tensor", "bytes_islands")


@dataclass(frozen=True)
class Times:
    """Median milliseconds of a step on the reporting rank.

    `wait`: for messages, without what the rank waits for late ones. `cost`: encoding and decoding.
    """

    step: float
    wait: float
    compress: float
    cost: float


@dataclass(frozen=True)
class Slowest:
    """The rank that is the slowest most often.

    `share`: part of the steps in which it is, in all of which it `always` counts as the same. `behind`: median time by
    which the slowest rank is behind the median one, in steps. `counts`: steps by rank. `lines`: where this is known.
    """

    rank: int
    share: float
    behind: float
    always: bool
    counts: Mapping[int, int]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Case:
    """A run, what to compare it with, and where figures begin to mean something."""

    run: Run
    baseline: Run | None = None
    limits: Thresholds = field(default_factory=Thresholds)

    @cached_property
    def compressed(self) -> tuple[Line, ...]:
        """Measured steps in which gradients were compressed."""
        return tuple(line for line in self.run.steps if line.get("method") != "none")

    @property
    def span(self) -> tuple[int, int]:
        """First and last step of `compressed`, or of all."""
        lines = self.compressed or self.run.steps
        return lines[0]["step"], lines[-1]["step"]

    def values(self, key: str, among: tuple[Line, ...] | None = None) -> list[float]:
        """What is known of `key`, by step."""
        lines = self.compressed if among is None else among
        return [float(line[key]) for line in lines if line.get(key) is not None]

    def median(self, key: str) -> float:
        """0 where nothing is known."""
        return statistics.median(self.values(key) or [0.0])

    @cached_property
    def times(self) -> Times | None:
        """None where the time of a step is not known."""
        usual = statistics.median(self.run.step_times) if self.run.step_times else None
        lines = [(line, line.get("step_ms") or usual) for line in self.compressed]
        known = [(line, float(step)) for line, step in lines if step and _has_times(line)]
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
        """Milliseconds in communication, less those in which a straggler, or ranks that are late by turns, let this one
        wait."""
        slowest = self.slowest
        uneven = slowest is not None and (slowest.always or slowest.behind >= self.limits.noise)
        return max(0.0, float(line["communicate_ms"]) - (self._ahead.get(line["step"], 0.0) if uneven else 0.0))

    @cached_property
    def _ahead(self) -> Mapping[int, float]:
        """By step: milliseconds for which the slowest rank was busy longer than this one, which the measured step after
        it tells."""
        pairs = pairwise(self.run.steps)
        told = [(line["step"], line.get("busy_ms"), after.get("busy_ms_max")) for line, after in pairs]
        return {step: slowest - own for step, own, slowest in told if own is not None and slowest is not None}

    @cached_property
    def slowest(self) -> "Slowest | None":
        """None where ranks were not compared in enough steps."""
        keys = ("busy_ms_max", "busy_ms_median", "slowest_rank", "step_ms")
        lines = [line for line in self.run.steps if all(line.get(key) is not None for key in keys)]
        if len(lines) < self.limits.lines:
            return None
        counts = Counter(int(line["slowest_rank"]) for line in lines)
        rank, count = counts.most_common(1)[0]
        behind = statistics.median((line["busy_ms_max"] - line["busy_ms_median"]) / line["step_ms"] for line in lines)
        always = count >= self.limits.same_rank * len(lines)
        return Slowest(rank, count / len(lines), behind, always, counts, tuple(lines))

    @property
    def alone(self) -> bool:
        """Whether there are no islands that could be looked at."""
        return self.run.section is not None and self.run.section.islands is None

    @property
    def weights_compressed(self) -> bool:
        return self.run.section is not None and self.run.section.weights.method != "none"

    @property
    def traffic(self) -> dict[str, float]:
        """Median bytes of a step by kind, none of them zero."""
        kinds = ("bytes_sent", "bytes_weights", *OTHER_KINDS)
        return {kind: size for kind in kinds if (size := self.median(kind))}

    @property
    def waited_bytes(self) -> float:
        """Median bytes of a step that are sent while the clock of `communicate_ms` runs."""
        return self.median("bytes_sent") + (self.median("bytes_weights") if self.weights_compressed else 0)

    @property
    def overlaps(self) -> bool:
        """Whether messages travel during backward, so that waiting says nothing of what more bytes would take."""
        zero = (self.run.config or {}).get("zero_optimization")
        written = zero.get("overlap_comm") if isinstance(zero, Mapping) else None
        return self.stage == 3 or written is not False

    @property
    def step_ms(self) -> float | None:
        """Median time of all steps, uncompressed ones too; None where it is not known."""
        known = self.values("step_ms", self.run.steps) or self.run.step_times
        return statistics.median(known) if known else None

    @cached_property
    def stage(self) -> int:
        """ZeRO stage; 0 where the configuration is not known."""
        section, config = self.run.section, self.run.config
        if section is None or config is None:
            return 0
        return STAGE.effective(config, section.parallelism or Parallelism())

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step; 1 where that is not written."""
        found = (self.run.config or {}).get("gradient_accumulation_steps")
        return found if isinstance(found, int) else 1

    @property
    def element_bytes(self) -> int:
        """Of a gradient as DeepSpeed sends it."""
        parts = ((self.run.config or {}).get(key) for key in ("bf16", "fp16"))
        return 2 if any(isinstance(part, Mapping) and part.get("enabled") for part in parts) else 4

    @property
    def sent_elements(self) -> float:
        """Elements of gradients that a rank sends in a micro-step. DeepSpeed alone sends each twice; with ZeRO 3 and
        NCCL once, and there it is half of them."""
        reductions = self.accumulation if self.stage >= 2 else 1
        return self.median("bytes_uncompressed") / (2 * self.element_bytes * reductions)

    @property
    def replicas(self) -> int | None:
        """Data-parallel ranks, from the samples of a step; None where the batch is not written."""
        micro, last = (self.run.config or {}).get("train_micro_batch_size_per_gpu"), self.run.steps[-1]
        if not isinstance(micro, int) or not last.get("samples"):
            return None
        return int(last["samples"]) // int(last["step"] * micro * self.accumulation)

    @property
    def encoded_bytes(self) -> float:
        """Bytes of gradients, as fp32, that are encoded in a step, at least."""
        reductions = self.accumulation if self.stage >= 2 else 1
        return 4 * self.sent_elements * reductions

    def patch(
        self,
        change: Callable[Concatenate[Mapping[str, Any], P], Mapping[str, Any] | None],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> dict[str, Any] | None:
        """The merge patch that does what `change` does to the configuration; None where that is not known."""
        config = self.run.config
        wanted = None if config is None else change(config, *arguments, **options)
        return None if wanted is None or config is None else difference(config, wanted)

    def lacks(self, need: str) -> bool:
        """Whether `need` is not recorded: a key of `NEEDS`, or a field of compression.jsonl, in `limits.lines` steps;
        "a|b" is there when one of them is."""
        return not any(self._has(option) for option in need.split("|"))

    def _has(self, need: str) -> bool:
        if need in NEEDS:
            return NEEDS[need][1](self)
        return len(self.values(need, self.run.steps)) >= self.limits.lines


def _has_times(line: Line) -> bool:
    return all(line.get(key) is not None for key in ("compress_ms", "communicate_ms", "decompress_ms"))


SAMPLES = 4
"""Cosines that a median needs; each costs an uncompressed message, so there are few."""

NEEDS: Mapping[str, tuple[str, Callable[[Case], bool]]] = MappingProxyType(
    {
        "config": ("ds_config.json (or --config) with a valid section", lambda case: case.run.section is not None),
        "events": ("events.jsonl", lambda case: case.run.events is not None),
        "losses": ("losses", lambda case: len(case.run.losses) >= case.limits.lines),
        "baseline": ("--baseline", lambda case: case.baseline is not None),
        "cosine": ("cosine", lambda case: len(case.values("cosine")) >= SAMPLES),
        "islands": (
            "islands_cosine",
            lambda case: case.alone or len(case.values("islands_cosine", case.run.steps)) >= SAMPLES,
        ),
        "ranks": ("slowest_rank and step_ms", lambda case: case.slowest is not None),
        "times": (
            "step_ms of compressed steps",
            lambda case: case.times is not None and len(case.compressed) >= case.limits.lines,
        ),
    }
)
"""What rules may need besides fields, as it is called, and whether it is there."""
