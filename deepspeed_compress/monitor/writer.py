"""Where the statistics of a step go: a JSON line, and DeepSpeed's monitor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed_compress.config.numbers import finite
from deepspeed_compress.monitor.journal import STATISTICS, Journal

__all__ = ["EventSink", "StatisticsWriter", "StepStatistics"]

EVENT_PREFIX = "Train/Samples/compression_"
LABELS = frozenset({"step", "samples", "method", "rank", "settings", "slowest_rank"})
"""Fields that measure nothing."""


@dataclass(frozen=True)
class StepStatistics:
    """One optimizer step. Bytes are of the whole step on `rank`, micro-steps included; times in milliseconds.
    `samples`: seen so far, None where no engine counts them.

    `bytes_sent`: payload of the gradients, of which `bytes_raw` are uncompressed; `bytes_uncompressed`: what DeepSpeed
    alone sends for them. `bytes_weights`: sent for updated weights, and `bytes_weights_saved` what uncompressed ones
    take besides; `bytes_pipeline`: activations and their gradients;
    `bytes_tied`: gradients of weights that stages share; `bytes_tensor`: collectives of split layers, None where they
    are in a compiled graph; `bytes_islands`: what islands exchanged after the step before. `total_ratio`: all that
    DeepSpeed alone sends, over all that is sent; `ratio`: the same of gradients. What DeepSpeed sends is counted as by
    ring algorithms. `residual_norm`: L2 norm of rank 0's residuals. `cosine`: between decoded and true mean gradient on
    the sampled bucket, None when not sampled. `islands_cosine`: between what this rank's masters have moved and those
    of the other islands, None without an exchange. What is not finite is written as null, which JSON can express.

    `settings`: what was in force, in short form. `step_ms`: since the end of the step before, None for the first of
    a process; `busy_ms`: the same without `communicate_ms`, and its median and maximum over all ranks, the latter that
    of `slowest_rank`, in the measured step before: None in the first. `memory_bytes`: the peak of the process so far,
    resident on CPU, allocated on GPU. `grad_norm`, with a guard alone: L2 norm of the mean gradient before clipping.
    `loss`, with a guard or adaptation alone: mean over ranks of the step before.
    """

    step: int
    samples: int | None
    method: str
    rank: int
    bytes_sent: int
    bytes_raw: int
    bytes_uncompressed: int
    bytes_weights: int
    bytes_weights_saved: int
    bytes_pipeline: int
    bytes_tied: int
    bytes_tensor: int | None
    total_ratio: float | None
    ratio: float | None
    compress_ms: float
    communicate_ms: float
    decompress_ms: float
    residual_norm: float | None
    cosine: float | None
    bytes_islands: int = 0
    islands_cosine: float | None = None
    settings: str = ""
    step_ms: float | None = None
    busy_ms: float | None = None
    busy_ms_median: float | None = None
    busy_ms_max: float | None = None
    slowest_rank: int | None = None
    memory_bytes: int | None = None
    grad_norm: float | None = None
    loss: float | None = None

    @property
    def time_ms(self) -> float:
        """What compression costs: encoding, communication, decoding."""
        return self.compress_ms + self.communicate_ms + self.decompress_ms


class EventSink(Protocol):
    """DeepSpeed's `MonitorMaster` (deepspeed/monitor/monitor.py)."""

    enabled: bool

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None: ...


class StatisticsWriter:
    """Writes on one rank: appends a line to compression.jsonl of `journal`, and sends events to `sink`."""

    def __init__(self, journal: Journal, sink: EventSink | None) -> None:
        self._journal = journal
        self._sink = sink

    @property
    def active(self) -> bool:
        """Whether anything is written anywhere."""
        return self._journal.active or (self._sink is not None and self._sink.enabled)

    def write(self, statistics: StepStatistics) -> None:
        # `asdict` would copy every value.
        fields = {name: finite(value) for name, value in vars(statistics).items()}
        self._journal.add(STATISTICS, fields)
        if self._sink is not None and self._sink.enabled:
            self._send(self._sink, _events({**fields, "time_ms": statistics.time_ms}))

    def _send(self, sink: EventSink, events: list[tuple[str, float, int]]) -> None:
        try:
            sink.write_events(events)
        except Exception as error:  # services fail in ways of their own, and other ranks wait for this one
            self._journal.fail("monitor", f"DeepSpeed's monitor has not taken figures of compression ({error!r})")


def _events(fields: dict[str, Any]) -> list[tuple[str, float, int]]:
    """Every number as an event on DeepSpeed's axis, the samples seen."""
    numbers = {name: value for name, value in fields.items() if name not in LABELS}
    return [(EVENT_PREFIX + name, value, fields["samples"]) for name, value in numbers.items() if value is not None]
