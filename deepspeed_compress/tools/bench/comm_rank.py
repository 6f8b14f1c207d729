"""One rank of `bench comm`: times each collective at each size and rate."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_compress.policy.alpha_beta import fit
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.collectives import COLLECTIVES, Collective
from deepspeed_compress.tools.bench.document import Row
from deepspeed_compress.tools.bench.launch import Emit, Say, rank_main
from deepspeed_compress.tools.bench.links import set_own_rate

__all__ = ["measure", "measure_messages"]

BATCHES = 3
"""Of which the median counts."""
BATCH_SECONDS, MOST_CALLS = 0.3, 100
"""A batch repeats short messages for about so long, and at most so often."""


def measure(job: Row, emit: Emit, say: Say) -> None:
    """The program on an emulated host. `job`: the rates and sizes."""
    gauges.join()
    measure_messages(job["rates"], job["sizes"], emit, say)
    dist.barrier()
    dist.destroy_process_group()


def measure_messages(rates: Sequence[str | None], sizes: Sequence[int], emit: Emit, say: Say) -> None:
    """Measure every collective; rank 0 emits a row for each, and says what is measured."""
    first = dist.get_rank() == 0
    for rate in rates:
        if rate is not None:
            set_own_rate(rate)
        for name, collective in COLLECTIVES.items():
            if first:
                say(f"{name}{f' at {rate}' if rate else ''}")
            row = _row(name, collective, rate, sizes)
            if first:
                emit(row)


def _row(name: str, collective: Collective, rate: str | None, sizes: Sequence[int]) -> Row:
    ranks = dist.get_world_size()
    whole = [max(1, size // ranks) * ranks for size in sizes]
    seconds = [
        _seconds(collective.prepare(torch.zeros(size, dtype=torch.uint8, device=gauges.device()))) for size in whole
    ]
    sent = [collective.sent(size, ranks) for size in whole]
    fitted = fit(whole, seconds)
    return {
        "collective": name,
        "ranks": ranks,
        "rate": rate,
        "sizes": whole,
        "seconds": seconds,
        "bus_bytes_per_s": [size / time for size, time in zip(sent, seconds, strict=True)],
        "fit": asdict(fitted),
        "fitted_bus_bytes_per_s": collective.sent(1, ranks) * fitted.bandwidth if fitted.seconds_per_byte else None,
    }


def _seconds(call: Callable[[], object]) -> float:
    """Of one call, the slowest rank's: the median of batches, which all ranks begin together."""
    calls = _calls(call)
    return statistics.median(float(max(gauges.gather(_batch(call, calls)))) for _ in range(BATCHES))


def _calls(call: Callable[[], object]) -> int:
    """How many make a batch, the same on every rank; the first call is not counted, it connects."""
    call()
    slowest = max(gauges.gather(_batch(call, 1)))
    return max(1, min(MOST_CALLS, int(BATCH_SECONDS / slowest)))


def _batch(call: Callable[[], object], calls: int) -> float:
    dist.barrier()
    get_accelerator().synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    get_accelerator().synchronize()
    return (time.perf_counter() - begin) / calls


if __name__ == "__main__":
    rank_main(measure)
