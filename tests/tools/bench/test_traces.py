"""Shares of a step, from the spans that torch's profiler writes."""

from typing import Any

import pytest

from deepspeed_compress.tools.bench.gauges import SHARES, STEP, shares
from deepspeed_compress.tools.bench.step import SHARES as COLUMNS


def span(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid}


EVENTS = [
    span(STEP, "user_annotation", 0, 100),
    span(STEP, "gpu_user_annotation", 5, 90),
    span("deepspeed_compress.compress", "user_annotation", 0, 50),
    span("deepspeed_compress.compress", "gpu_user_annotation", 10, 4),
    span("deepspeed_compress.compress", "gpu_user_annotation", 12, 4),
    span("deepspeed_compress.decompress", "gpu_user_annotation", 20, 1),
    span("deepspeed_compress.communicate", "user_annotation", 40, 20),
    span("gemm", "kernel", 0, 60, tid=7),
    span("gemm", "kernel", 50, 20, tid=7),
    span("Memcpy", "gpu_memcpy", 0, 30, tid=8),
    {"ph": "i", "name": "mark", "ts": 3},
]


def test_shares_of_a_step() -> None:
    assert COLUMNS == SHARES
    expected = dict(zip(SHARES, (0.06, 0.01, 0.2, 0.3), strict=True))
    assert shares(EVENTS, on_gpu=True) == pytest.approx(expected)
    assert shares(EVENTS, on_gpu=False)["encode"] == pytest.approx(0.5)
