"""The figures of measured steps: gathered from what counts and watches, and handed to whoever asked for them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed import ProcessGroup

from deepspeed_compress.config import Monitor
from deepspeed_compress.monitor import KINDS, Meter, StepStatistics, peak_memory
from deepspeed_compress.policy import Observation, StepPlan
from deepspeed_compress.session.observer import BusyTimes

__all__ = ["ByteReport", "Reporter", "Sizes"]

Sink = Callable[[StepStatistics], None]
Sizes = Mapping[str, Any]
"""Bytes, int, by field of the meter; None for what could not be counted."""

ByteReport = Callable[[Sizes], tuple[int, Sizes] | None]
"""From the bytes of this rank to the rank whose bytes are reported, and these; None on ranks that do not report."""


class Reporter:
    """Reports every `monitor.every`-th step to its sinks.

    `byte_report` gives the rank whose bytes are reported and those bytes, from the bytes of this one; None on ranks
    that do not report. Every rank must have the same number of sinks, because some figures are of all ranks.
    `others_listen`: whether steps are to be measured for others than sinks. `group`: the ranks that report
    together; None for all of the job.
    """

    def __init__(
        self,
        monitor: Monitor,
        meter: Meter,
        byte_report: ByteReport,
        device: torch.device,
        others_listen: Callable[[], bool] = lambda: False,
        group: ProcessGroup | None = None,
    ) -> None:
        self.sinks: list[Sink] = []
        self._every = monitor.every
        self._meter = meter
        self._byte_report = byte_report
        self._device = device
        self._ended: float | None = None
        self._others_listen = others_listen
        self._busy_times = BusyTimes(device, group)

    def due(self, step: int) -> bool:
        """Whether the finished `step`, from 1, is measured: some are, if anyone wants to know."""
        return step % self._every == 0 and (bool(self.sinks) or self._others_listen())

    def step_ended(self) -> float | None:
        """Milliseconds since the end of the step before; None for the first."""
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
        """Hand the figures of a step on. Collective. `norm`: of this rank's residuals; asked for where it is reported.

        On a GPU one of them waits until it has done all that was asked of it; afterwards nothing else has to.
        """
        if not self.sinks:
            return
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
            ratio=_ratio(sizes),
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
            sink(figures)


def _total_ratio(sizes: Sizes) -> float | None:
    """Of all traffic that could be counted; None where islands exchange, which DeepSpeed alone does not."""
    if sizes["bytes_islands"]:
        return None
    sent = sum(sizes[kind] or 0 for kind in KINDS)
    ours = sizes["bytes_sent"] + sizes["bytes_islands"]
    alone = sent - ours + sizes["bytes_uncompressed"] + sizes["bytes_weights_saved"]
    return alone / sent if sent else None


def _ratio(sizes: Sizes) -> float | None:
    return sizes["bytes_uncompressed"] / sizes["bytes_sent"] if sizes["bytes_sent"] else None
