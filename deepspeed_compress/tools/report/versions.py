"""Figures of the versions that are published for rollout workers."""

import statistics

from deepspeed_compress.tools.report.runs import Run


def count(run: Run) -> float | None:
    """Return the number of versions, or None if there are none."""
    return len(run.column("rollout_version")) or None


def full_copy(run: Run) -> float | None:
    """Return the mean bytes of a full copy, or None if there are none."""
    sizes = [size for size in run.column("rollout_full_bytes").values() if size]
    return statistics.fmean(sizes) if sizes else None
