"""Program of a rank: it joins the others and measures what its jobs ask for, at the same time as they do.

The jobs of `bench step` are in `step_rank`. Here are those of `bench comm` (collectives and activations), and the
probes of `plan cluster`: matrix products, copies, kernels, and collectives.
"""

import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_compress.backends.activations.crossover import measure as measure_message
from deepspeed_compress.collectives.exchange import exchange
from deepspeed_compress.policy.measurement import fit
from deepspeed_compress.tools.bench import gauges, kernels, step_rank
from deepspeed_compress.tools.bench.hosts import fork_ranks, wait_for_ranks
from deepspeed_compress.tools.bench.jobs import Emit, Log, Row, ignore, print_progress
from deepspeed_compress.tools.bench.links import set_own_rate

Group = Any
"""Process group of torch."""


@dataclass(frozen=True)
class Collective:
    """Collective to be timed.

    Attributes:
        prepare: Function that takes a uint8 buffer, whose length is a multiple of the number of ranks, and their group,
            and returns the call to be timed.
        rounds: How often a ring algorithm sends the parts of the buffer that are not the rank's own. Each round sends
            (R - 1) / R of the buffer with R ranks.
    """

    prepare: Callable[[Tensor, Group], Callable[[], object]]
    rounds: int = 1

    def sent(self, size: int, ranks: int) -> float:
        """Return the least number of bytes that a rank sends for a buffer of `size` bytes."""
        return self.rounds * size * (ranks - 1) / ranks


def _own(buffer: Tensor, group: Group) -> Tensor:
    return buffer.new_zeros(buffer.numel() // dist.get_world_size(group))


def _all_reduce(buffer: Tensor, group: Group) -> Callable[[], object]:
    return lambda: dist.all_reduce(buffer, group=group)


def _all_gather(buffer: Tensor, group: Group) -> Callable[[], object]:
    own = _own(buffer, group)
    return lambda: dist.all_gather_into_tensor(buffer, own, group=group)


def _reduce_scatter(buffer: Tensor, group: Group) -> Callable[[], object]:
    own = _own(buffer, group)
    return lambda: dist.reduce_scatter_tensor(own, buffer, group=group)


def _all_to_all(buffer: Tensor, group: Group) -> Callable[[], object]:
    out = torch.empty_like(buffer)
    return lambda: dist.all_to_all_single(out, buffer, group=group)


def _exchange(buffer: Tensor, group: Group) -> Callable[[], object]:
    outgoing = buffer.chunk(group.size())
    incoming = torch.empty_like(buffer).chunk(group.size())
    return lambda: exchange(group, outgoing, incoming)


COLLECTIVES: Mapping[str, Collective] = {
    "all_reduce": Collective(_all_reduce, rounds=2),
    "all_gather_into_tensor": Collective(_all_gather),
    "reduce_scatter_tensor": Collective(_reduce_scatter),
    "all_to_all_single": Collective(_all_to_all),
    "exchange": Collective(_exchange),
}
"""Collectives by name. `exchange` is the one that carries compressed messages."""


BATCHES = 3
"""Number of batches. Their median is reported."""
BATCH_SECONDS, MOST_CALLS = 0.3, 100
"""Target duration of a batch, in which short messages are repeated, and the maximum number of calls in it."""


def measure_messages(
    rates: Sequence[str | None],
    sizes: Sequence[int],
    emit: Emit,
    log: Log,
    group: Group | None = None,
    batch_seconds: float = BATCH_SECONDS,
) -> None:
    """Measure every collective among the ranks of `group`, or among all ranks if it is None.

    If ranks are in different groups, all groups communicate at the same time. Each size is repeated in batches of
    `batch_seconds`.
    """
    group = group or dist.distributed_c10d._get_default_group()
    for rate in rates:
        if rate is not None:
            set_own_rate(rate)
        for name, collective in COLLECTIVES.items():
            log(f"{name}{f' at {rate}' if rate else ''}")
            emit(_row(name, collective, rate, sizes, group, batch_seconds))


def _row(
    name: str, collective: Collective, rate: str | None, sizes: Sequence[int], group: Group, batch_seconds: float
) -> Row:
    ranks = dist.get_world_size(group)
    whole = [max(1, size // ranks) * ranks for size in sizes]
    seconds = [
        _seconds_of_batches(
            collective.prepare(torch.zeros(size, dtype=torch.uint8, device=gauges.device()), group), batch_seconds
        )
        for size in whole
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


def _seconds_of_batches(call: Callable[[], object], batch_seconds: float) -> float:
    """Return the seconds of one call on the slowest rank: the median over batches, which all ranks start together.

    All ranks repeat the call equally often in a batch. The first call, which connects, is not timed.
    """
    call()
    slowest = max(gauges.gather(_batch(call, 1)))
    calls = max(1, min(MOST_CALLS, int(batch_seconds / slowest)))
    return statistics.median(float(max(gauges.gather(_batch(call, calls)))) for _ in range(BATCHES))


def _batch(call: Callable[[], object], calls: int) -> float:
    dist.barrier()
    get_accelerator().synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    get_accelerator().synchronize()
    return (time.perf_counter() - begin) / calls


BITS = (8, 4)
DTYPE = torch.bfloat16
"""Type of uncompressed activations."""


def measure_activations(job: Row, emit: Emit, log: Log) -> None:
    """Measure activations of a `kind` in 8 and 4 bits and in bf16, and emit a row for each rate."""
    kind, group = job["kind"], dist.distributed_c10d._get_default_group()
    for rate in job["rates"]:
        log(f"{kind}{f' at {rate}' if rate else ''}")
        if rate is not None:
            set_own_rate(rate)
        messages = []
        for size, bits in product(job["sizes"], BITS):
            found = measure_message(group, kind, [bits], size // DTYPE.itemsize, DTYPE, gauges.device())
            messages.append(asdict(found) | {"bits": bits, "rate": found.rate})
        emit({"kind": kind, "ranks": group.size(), "rate": rate, "messages": messages})


REPEATS = 7
_TYPES: Mapping[int, torch.dtype] = {2: torch.bfloat16, 4: torch.float32}
CODING = re.compile("^(quantize int4, bf16 memory|decode-accumulate int4)$")
"""Operations of `bench kernels` that encode and decode a message."""


def measure_probes(job: Row, emit: Emit, log: Log) -> None:
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
    for row in kernels.measure(job["numel"], gauges.device(), REPEATS, CODING):
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


MEASURES: Mapping[str, Callable[[Row, Emit, Log], None]] = {
    "steps": step_rank.measure,
    "collectives": lambda job, emit, log: measure_messages(job["rates"], job["sizes"], emit, log),
    "activations": measure_activations,
    "probes": measure_probes,
}
"""Functions that measure a job, by its key `measure`."""


def measure(jobs: Sequence[Row], emit: Emit, log: Log) -> None:
    """Measure `jobs`, one after the other."""
    for job in jobs:
        MEASURES[job["measure"]](job, emit, log)


def main() -> None:
    """Join the other hosts and measure the jobs of a file. Rank 0 appends the rows to the result file."""
    copies = fork_ranks()
    jobs, result = (Path(argument) for argument in sys.argv[1:])
    emit, log = (partial(_append, result), print_progress) if gauges.join().is_first else (ignore, ignore)
    measure(json.loads(jobs.read_text(encoding="utf-8")), emit, log)
    dist.barrier()
    dist.destroy_process_group()
    wait_for_ranks(copies)


def _append(file: Path, row: Row) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
