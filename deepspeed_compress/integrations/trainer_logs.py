"""Compression figures for the logs of Hugging Face Trainer."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_compress.monitor import KINDS, StepStatistics

_NEWEST: Mapping[str, Callable[[StepStatistics], float | None]] = {
    "residual_norm": lambda step: step.residual_norm,
    "cosine": lambda step: step.cosine,
}
"""Figures of which the newest value is logged. For all others, the mean is logged."""


def log_entries(measured: list[StepStatistics]) -> dict[str, float]:
    """Return the log entries for the `measured` steps, of which there is at least one.

    Kinds of traffic that sent no bytes are left out.
    """
    sent = sum(step.bytes_sent for step in measured)
    uncompressed = sum(step.bytes_uncompressed for step in measured)
    found: dict[str, float] = _total_ratio(measured) | ({"ratio": uncompressed / sent} if sent else {})
    for kind in (*KINDS, "bytes_exact"):
        mean = statistics.fmean(getattr(step, kind) or 0 for step in measured)
        found |= {kind: mean} if mean or kind == "bytes_sent" else {}
    found["time_ms"] = statistics.fmean(step.time_ms for step in measured)
    for name, read in _NEWEST.items():
        known = [value for value in map(read, measured) if value is not None]
        found |= {name: known[-1]} if known else {}
    return {f"compression_{name}": value for name, value in found.items()}


def to_megabytes(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `logs` with megabytes in place of bytes: `compression_bytes_sent` becomes `compression_MB_sent`."""
    return dict(map(_in_megabytes, logs.items()))


def _in_megabytes(entry: tuple[str, Any]) -> tuple[str, Any]:
    name, value = entry
    if not name.startswith(_BYTES):
        return entry
    return _MEGABYTES + name.removeprefix(_BYTES), round(value / 1e6, 3)


_BYTES, _MEGABYTES = "compression_bytes_", "compression_MB_"


def _total_ratio(measured: list[StepStatistics]) -> dict[str, float]:
    """Return the ratio of the bytes that plain DeepSpeed would send to all bytes sent; empty if it is unknown."""
    known = [(step.total_ratio, sum(getattr(step, kind) or 0 for kind in KINDS)) for step in measured]
    pairs = [(ratio, sent) for ratio, sent in known if ratio is not None]
    sent = sum(sent for _, sent in pairs)
    return {"total_ratio": sum(ratio * sent for ratio, sent in pairs) / sent} if sent else {}
