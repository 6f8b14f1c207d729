"""Statistics of steps and of published versions, and their writers: a JSON line and DeepSpeed's monitor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deepspeed_compress.config.numbers import finite
from deepspeed_compress.monitor.journal import STATISTICS, Journal

EVENT_PREFIX = "Train/Samples/compression_"
LABELS = frozenset({"step", "samples", "method", "rank", "settings", "slowest_rank"})
"""Fields that are labels, not measurements."""
VERSIONS = "rollout.jsonl"
"""File with a line for each published version."""


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of one optimizer step on one rank; micro-steps are included.

    Values that are not finite are written as null. Bytes that DeepSpeed alone would send are those of ring algorithms.

    Attributes:
        step: optimizer step, 1-based.
        samples: samples seen so far; None if no engine counts them.
        method: method of the gradients.
        rank: the rank.
        bytes_sent: payload bytes of the gradients.
        bytes_raw: the uncompressed part of `bytes_sent`.
        bytes_uncompressed: bytes that DeepSpeed alone would send for the gradients.
        bytes_weights: bytes of updated weights.
        bytes_weights_saved: bytes that uncompressed weights would take in addition.
        bytes_pipeline: bytes of activations and their gradients between pipeline stages.
        bytes_tied: bytes of gradients of weights that stages share.
        bytes_tensor: bytes of collectives of tensor-parallel layers; None if they are in a compiled graph.
        total_ratio: all bytes that DeepSpeed alone would send, divided by all bytes sent.
        ratio: the same ratio for gradients alone.
        compress_ms: milliseconds of encoding.
        communicate_ms: milliseconds of communication.
        decompress_ms: milliseconds of decoding.
        residual_norm: L2 norm of rank 0's residuals.
        cosine: cosine between the decoded and the true mean gradient of the sampled bucket; None if not sampled.
        bytes_islands: bytes that this rank sent to other islands after the previous step.
        bytes_exact: bytes of exact weights that this rank sent after the previous step, for a checkpoint; in
            no ratio.
        bytes_pipeline_saved: bytes that DeepSpeed alone would send between stages in addition.
        bytes_tensor_saved: bytes that DeepSpeed alone would send between tensor-parallel ranks in addition.
        bytes_experts: bytes of tokens and their gradients between ranks that share experts; None as `bytes_tensor`.
        bytes_experts_saved: bytes that DeepSpeed alone would send between ranks that share experts in addition.
        bytes_sequence: bytes of all-to-alls between sequence-parallel ranks.
        bytes_sequence_saved: bytes that DeepSpeed alone would send between sequence-parallel ranks in addition.
        islands_cosine: cosine between the update of this rank's fp32 master weights and that of the other islands;
            None without an exchange.
        settings: settings in force, in short form.
        step_ms: milliseconds since the end of the previous step; None for the first step of a process.
        busy_ms: `step_ms` minus `communicate_ms`.
        busy_ms_median: median of `busy_ms` over all ranks in the previous measured step; None in the first.
        busy_ms_max: maximum of `busy_ms` over all ranks in the previous measured step; None in the first.
        slowest_rank: the rank with `busy_ms_max`.
        memory_bytes: peak memory of the process so far: resident on the CPU, allocated on a GPU.
        grad_norm: L2 norm of the mean gradient before clipping; only with a guard.
        loss: mean loss over the ranks in the previous step; only with a guard or an adaptive policy.
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
    bytes_exact: int = 0
    bytes_pipeline_saved: int = 0
    bytes_tensor_saved: int = 0
    bytes_experts: int | None = 0
    bytes_experts_saved: int = 0
    bytes_sequence: int = 0
    bytes_sequence_saved: int = 0
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
        """Return the milliseconds of encoding, communication and decoding."""
        return self.compress_ms + self.communicate_ms + self.decompress_ms


class EventSink(Protocol):
    """Protocol of DeepSpeed's `MonitorMaster` (deepspeed/monitor/monitor.py)."""

    enabled: bool

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None: ...


class StatisticsWriter:
    """Appends a line per step to compression.jsonl of `journal`, and sends events to `sink`; used on one rank."""

    def __init__(self, journal: Journal, sink: EventSink | None) -> None:
        self._journal = journal
        self._sink = sink

    @property
    def active(self) -> bool:
        """Return True if statistics are written anywhere."""
        return self._journal.active or (self._sink is not None and self._sink.enabled)

    def write(self, statistics: StepStatistics) -> None:
        # `asdict` would copy every value.
        fields = {name: finite(value) for name, value in vars(statistics).items()}
        self._journal.add(STATISTICS, fields)
        if self._sink is None or not self._sink.enabled:
            return
        # An event for every number, on DeepSpeed's axis, which is the number of samples seen.
        numbers = {name: value for name, value in fields.items() if name not in LABELS and value is not None}
        numbers["time_ms"] = statistics.time_ms
        try:
            self._sink.write_events([(EVENT_PREFIX + name, one, fields["samples"]) for name, one in numbers.items()])
        except Exception as error:  # monitoring services raise errors of their own, and other ranks wait for this one
            self._journal.fail("monitor", f"DeepSpeed's monitor did not accept the statistics ({error!r})")
