"""Figures of measured steps: collected from meters and observers, and passed to subscribers."""

import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup

from deepspeed_compress.config.models import Monitor
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor import KINDS, SAVED, Meter, StepStatistics
from deepspeed_compress.monitor.meter import peak_memory
from deepspeed_compress.policy.decider import Observation, StepPlan
from deepspeed_compress.session.observer import BusyTimes

Sink = Callable[[StepStatistics], None]
Sizes = Mapping[str, Any]
"""Bytes (int) by field of the meter; None for what could not be counted."""

ByteReport = Callable[[Sizes], tuple[int, Sizes] | None]
"""Function from this rank's bytes to the rank whose bytes are reported and those bytes; None on other ranks."""


class Reporter:
    """Reporter of every `monitor.every`-th step to its sinks.

    Every rank must have the same number of sinks, because some figures are computed over all ranks.

    Args:
        monitor: the section's settings.
        meter: the counts and times of this rank.
        byte_report: returns the rank whose bytes are reported and those bytes, from the bytes of this rank; None on
            ranks that do not report.
        device: the device of the reductions.
        group: the ranks that report together; None for the whole job.
    """

    def __init__(
        self,
        monitor: Monitor,
        meter: Meter,
        byte_report: ByteReport,
        device: torch.device,
        group: ProcessGroup | None = None,
    ) -> None:
        self.sinks: list[Sink] = []
        self._every, self._meter, self._byte_report, self._device = monitor.every, meter, byte_report, device
        self._ended: float | None = None
        self._busy_times = BusyTimes(device, group)

    def due(self, step: int) -> bool:
        """Return True if the finished `step` (1-based) is measured: every `every`-th, if anyone wants the figures."""
        return step % self._every == 0 and bool(self.sinks)

    def step_ended(self) -> float | None:
        """Return the milliseconds since the end of the previous step; None for the first."""
        now, before = time.perf_counter(), self._ended
        self._ended = now
        return None if before is None else 1e3 * (now - before)

    def report(
        self,
        seen: Observation,
        samples: int | None,
        plan: StepPlan,
        step_ms: float | None,
        norm: Callable[[], float | None],
    ) -> None:
        """Pass the figures of a step to the sinks. Collective.

        `norm` returns the norm of this rank's residuals; it is called only on ranks that report. On a GPU, one of the
        figures waits for all work that was queued; afterwards nothing else has to.
        """
        found = self._byte_report(self._meter.sizes())
        residual_norm = None if found is None else norm()
        times = self._meter.milliseconds()
        busy = None if step_ms is None else max(0.0, step_ms - times["communicate"])
        everyone = self._busy_times.next(busy)
        if found is None:
            return
        rank, sizes = found
        figures = StepStatistics(
            step=seen.step,
            samples=samples,
            method="none" if plan.dense else plan.settings.method,
            rank=rank,
            **sizes,
            total_ratio=_total_ratio(sizes),
            ratio=sizes["bytes_uncompressed"] / sizes["bytes_sent"] if sizes["bytes_sent"] else None,
            compress_ms=times["compress"],
            communicate_ms=times["communicate"],
            decompress_ms=times["decompress"],
            residual_norm=residual_norm,
            cosine=None if self._meter.cosine is None else self._meter.cosine(),
            islands_cosine=None if self._meter.islands_cosine is None else self._meter.islands_cosine(),
            settings=plan.text,
            step_ms=step_ms,
            busy_ms=busy,
            busy_ms_median=statistics.median(everyone) if everyone else None,
            busy_ms_max=max(everyone) if everyone else None,
            slowest_rank=everyone.index(max(everyone)) if everyone else None,
            memory_bytes=peak_memory(self._device),
            grad_norm=seen.grad_norm,
            loss=seen.loss,
        )
        for sink in self.sinks:
            _pass(figures, sink)


def _pass(figures: StepStatistics, sink: Sink) -> None:
    try:
        sink(figures)
    except Exception as error:  # other ranks wait for this one
        text = f"a subscriber did not accept the statistics of step {figures.step} ({error!r}); training continues"
        warnings.warn(text, CompressWarning, stacklevel=3)


def _total_ratio(sizes: Sizes) -> float | None:
    """Return the ratio of all countable traffic; None if islands exchange, which plain DeepSpeed cannot do."""
    if sizes["bytes_islands"]:
        return None
    sent = sum(sizes[kind] or 0 for kind in KINDS)
    alone = sent - sizes["bytes_sent"] + sizes["bytes_uncompressed"] + sum(sizes[saved] for saved in SAVED)
    return alone / sent if sent else None
