"""One rank of the probes of `plan cluster --measure`: matrix products, copies, kernels, and collectives.

All ranks measure at the same time, as they compute at the same time in training.
"""

import re
import statistics
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from deepspeed_compress.tools.bench import gauges, kernels
from deepspeed_compress.tools.bench.comm_rank import measure_messages
from deepspeed_compress.tools.bench.jobs import Emit, Log, Row, rank_main
from deepspeed_compress.tools.bench.links import set_own_rate

REPEATS = 7
_TYPES: Mapping[int, torch.dtype] = {2: torch.bfloat16, 4: torch.float32}
CODING = re.compile("^(quantize int4, bf16 memory|decode-accumulate int4)$")
"""Operations of `bench kernels` that encode and decode a message."""


def measure(job: Row, emit: Emit, log: Log) -> None:
    """Measure all probes, and emit a row for each.

    `job` holds the bytes of an element (`element`), the sizes of matrix products (`products`), the elements of other
    kernels (`numel`), the bytes of messages (`sizes`) and the seconds of their batches (`batch_seconds`), the ranks of
    a host (`per_host`), and the `rate` of emulated links, or None.
    """
    if job["rate"] is not None:
        set_own_rate(job["rate"])
    log("matrix products")
    for sizes in job["products"]:
        emit({"kind": "product", "sizes": sizes, "seconds": _seconds(_product(_TYPES[job["element"]], *sizes))})
    log("kernels")
    small = torch.zeros(1, device=gauges.device())
    emit({"kind": "kernel", "sizes": [], "seconds": _seconds(partial(small.add_, 1))})
    dist.barrier()
    for row in kernels.measure(job["numel"], gauges.device(), REPEATS, CODING, in_use=True):
        kind = "copy" if row["operation"] == kernels.COPY else "coding"
        emit({"kind": kind, "sizes": [row["bytes_moved"]], "seconds": _mean(row["seconds"]["median"])})
    for group in _groups(job["per_host"]):
        measure_messages([None], job["sizes"], partial(_emit_messages, emit), log, group, job["batch_seconds"])


def _product(dtype: torch.dtype, rows: int, columns: int, inner: int) -> Callable[[], object]:
    left = torch.ones(rows, inner, dtype=dtype, device=gauges.device())
    right = torch.ones(inner, columns, dtype=dtype, device=gauges.device())
    return partial(torch.matmul, left, right)


def _seconds(call: Callable[[], object]) -> float:
    dist.barrier()
    [taken] = kernels.seconds([call], gauges.device(), REPEATS)
    return _mean(statistics.median(taken))


def _mean(seconds: float) -> float:
    """Return the mean over all ranks."""
    everyone: list[float] = gauges.gather(seconds)
    return statistics.mean(everyone)


def _groups(per_host: int) -> list[dist.ProcessGroup]:
    """Return the group of all ranks, and the group of this host's ranks if it has several and is not alone."""
    ranks, size = dist.get_rank(), dist.get_world_size()
    hosts = [dist.new_group(range(first, first + per_host)) for first in range(0, size, per_host)]
    several = 1 < per_host < size
    return [dist.group.WORLD, *([hosts[ranks // per_host]] if several else [])]


def _emit_messages(emit: Emit, row: Row) -> None:
    """Emit a row for each size of a collective."""
    for size, seconds in zip(row["sizes"], row["seconds"], strict=True):
        emit({"kind": row["collective"], "sizes": [size, row["ranks"]], "seconds": seconds})


if __name__ == "__main__":
    rank_main(measure)
