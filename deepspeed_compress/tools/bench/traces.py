"""Traces of single steps under torch's profiler, for https://ui.perfetto.dev, and the shares of the work in them."""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.profiler import ProfilerActivity, profile, record_function

from deepspeed_compress.tools.bench.gauges import device

STEP = "deepspeed_compress.step"
"""Name of the span of the whole step."""
_PHASES: Mapping[str, str] = {"encode": "compress", "decode": "decompress", "exchange": "communicate"}
"""Shares and the phases of the meter, which the profiler shows as "deepspeed_compress.PHASE"."""
_IDLE = "idle"
SHARES = (*_PHASES, _IDLE)
"""Shares of a step. The last one, of the time in which no kernel runs on the busiest stream, needs a GPU."""
_ON_STREAM = ("kernel", "gpu_memcpy", "gpu_memset")

Event = Mapping[str, Any]


def trace_step(step: Callable[[], object], file: Path) -> dict[str, float]:
    """Take a step on every rank. Rank 0 writes its trace to `file` (.json.gz) and returns the shares."""
    on_gpu = device().type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    get_accelerator().synchronize()
    with profile(activities=activities) as profiler, record_function(STEP):
        step()
        get_accelerator().synchronize()
    found: dict[str, float] = {}
    if dist.get_rank() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(file))
        with gzip.open(file, "rt", encoding="utf-8") as stream:
            found = shares(json.load(stream)["traceEvents"], on_gpu)
    dist.barrier()
    return found


def shares(events: Sequence[Event], on_gpu: bool) -> dict[str, float]:
    """Return the fraction of the profiled step's time for each of `SHARES`."""
    spans = [one for one in events if one.get("ph") == "X"]
    [step] = [one for one in spans if one["name"] == STEP and one["cat"] == "user_annotation"]
    kind = "gpu_user_annotation" if on_gpu else "user_annotation"
    whole, found = step["dur"], {}
    for share, phase in _PHASES.items():
        # With gloo, the host waits for messages.
        seen = kind if phase != "communicate" else "user_annotation"
        ours = (one for one in spans if one["name"] == f"deepspeed_compress.{phase}" and one["cat"] == seen)
        found[share] = covered(ours) / whole
    if on_gpu:
        found[_IDLE] = 1 - _busiest(spans) / whole
    return found


def _busiest(spans: Iterable[Event]) -> float:
    """Return the microseconds for which the busiest stream works."""
    streams = defaultdict(list)
    for one in spans:
        if one.get("cat") in _ON_STREAM:
            streams[one["tid"]].append(one)
    return max(map(covered, streams.values()), default=0.0)


def covered(spans: Iterable[Event]) -> float:
    """Return the microseconds in which at least one of `spans` is active."""
    total, end = 0.0, float("-inf")
    for begin, length in sorted((one["ts"], one["dur"]) for one in spans):
        total += max(0.0, begin + length - max(begin, end))
        end = max(end, begin + length)
    return total
