"""Part 6: a Chrome trace of one step, and a breakdown of its time."""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from deepspeed_compress.tools.gpu_check.findings import Finding, Task
from deepspeed_compress.tools.gpu_check.language_model import SHAPES
from deepspeed_compress.tools.gpu_check.ranks import backend_here, missing, run_ranks

__all__ = ["covered", "findings", "shares", "trace"]

_RANKS, _WARM_UP = 2, 4
_STAGE, _BUCKET = 2, 50_000_000
_STEP = "gpu_check.step"
_NAMES = {"compress": "our kernels, sender", "decompress": "our kernels, receiver", "communicate": "the exchange"}
"""Names of the meter's phases, which the profiler shows as "deepspeed_compress.PHASE"."""
_ON_STREAM = ("kernel", "gpu_memcpy", "gpu_memset")
_TRACE = "gpu_check_trace.json.gz"

Event = Mapping[str, Any]


def findings(task: Task) -> Iterator[Finding]:
    """Yield a breakdown of a step of rank 0 with 4 bits under ZeRO 2.

    The trace can be viewed in chrome://tracing or ui.perfetto.dev.
    """
    if absent := missing():
        yield Finding("a step", "not run", why=absent)
        return
    backend, file = backend_here(task.device, _RANKS), task.output / _TRACE
    job = {"device": task.device, "backend": backend, "file": str(file)}
    said = run_ranks(_RANKS, f"{__name__}:trace", job, 0.95 * task.seconds)
    if said.trouble or not file.is_file():
        yield Finding("a step", "fail", why=said.trouble or "it left no trace")
        return
    with gzip.open(file, "rt", encoding="utf-8") as stream:
        events = json.load(stream)["traceEvents"]
    yield Finding("trace of a step", "pass", f"{file.name}, {len(events):,} events, {backend}")
    for what, share in shares(events, task.on_gpu).items():
        yield Finding(what, "pass", f"{share:.1%} of the step")
    if not task.on_gpu:
        yield Finding("the compute stream is idle", "not run", why="needs CUDA")


def shares(events: Sequence[Event], on_gpu: bool) -> dict[str, float]:
    """Return the fraction of the profiled step's time for each kind of work."""
    spans = [one for one in events if one.get("ph") == "X"]
    [step] = [one for one in spans if one["name"] == _STEP and one["cat"] == "user_annotation"]
    kind = "gpu_user_annotation" if on_gpu else "user_annotation"
    whole, found = step["dur"], {}
    for phase, what in _NAMES.items():
        # With gloo, the host waits for messages.
        seen = kind if phase != "communicate" else "user_annotation"
        ours = (one for one in spans if one["name"] == f"deepspeed_compress.{phase}" and one["cat"] == seen)
        found[what] = covered(ours) / whole
    if on_gpu:
        found["the compute stream is idle"] = 1 - _busiest(spans) / whole
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


def trace(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Train on a rank. Rank 0 writes the trace of one step."""
    import torch
    from deepspeed.accelerator import get_accelerator
    from torch.profiler import ProfilerActivity, profile, record_function

    from deepspeed_compress.tools.gpu_check.workload import (
        INT4,
        LanguageModel,
        Shape,
        make_engine,
        markov_text,
        train_step,
    )

    rank, shape = torch.distributed.get_rank(), Shape(**SHAPES[job["device"]])
    torch.manual_seed(0)
    engine = make_engine(LanguageModel(shape), job["device"], _STAGE, INT4, _BUCKET)
    text = markov_text(shape, _WARM_UP + 1, seed=1 + rank).to(get_accelerator().current_device_name())
    for batch in text[:_WARM_UP]:
        train_step(engine, batch)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job["device"] == "cuda" else [])]
    get_accelerator().synchronize()
    with profile(activities=activities) as profiler, record_function(_STEP):
        train_step(engine, text[-1])
        get_accelerator().synchronize()
    if rank == 0:
        profiler.export_chrome_trace(job["file"])
    torch.distributed.barrier()
    yield {"rank": rank}
