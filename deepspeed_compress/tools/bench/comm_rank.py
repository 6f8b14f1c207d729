"""One rank of `bench comm`. It times each collective, or activations, at each size and rate."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_compress.backends.activations.crossover import Kind
from deepspeed_compress.backends.activations.crossover import measure as measure_message
from deepspeed_compress.collectives.exchange import exchange
from deepspeed_compress.policy.measurement import fit
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.jobs import Emit, Log, Row, rank_main
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


def measure(job: Row, emit: Emit, log: Log) -> None:
    """Measure messages among all ranks. `job` holds their kind, the rates of links, and the sizes in bytes."""
    if job["kind"] == "collectives":
        measure_messages(job["rates"], job["sizes"], emit, log)
    else:
        measure_activations(job["kind"], job["rates"], job["sizes"], emit, log)


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
        _seconds(collective.prepare(torch.zeros(size, dtype=torch.uint8, device=gauges.device()), group), batch_seconds)
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


def _seconds(call: Callable[[], object], batch_seconds: float) -> float:
    """Return the seconds of one call on the slowest rank: the median over batches, which all ranks start together."""
    calls = _calls(call, batch_seconds)
    return statistics.median(float(max(gauges.gather(_batch(call, calls)))) for _ in range(BATCHES))


def _calls(call: Callable[[], object], batch_seconds: float) -> int:
    """Return the number of calls per batch, the same on every rank. The first call, which connects, is not timed."""
    call()
    slowest = max(gauges.gather(_batch(call, 1)))
    return max(1, min(MOST_CALLS, int(batch_seconds / slowest)))


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


def measure_activations(kind: Kind, rates: Sequence[str | None], sizes: Sequence[int], emit: Emit, log: Log) -> None:
    """Measure activations in 8 and 4 bits and in bf16, and emit a row for each rate."""
    for rate in rates:
        log(f"{kind}{f' at {rate}' if rate else ''}")
        if rate is not None:
            set_own_rate(rate)
        emit({"kind": kind, "ranks": dist.get_world_size(), "rate": rate, "messages": list(_rows(kind, sizes))})


def _rows(kind: Kind, sizes: Sequence[int]) -> Iterator[Row]:
    group = dist.distributed_c10d._get_default_group()
    for size in sizes:
        for bits in BITS:
            found = measure_message(group, kind, [bits], size // DTYPE.itemsize, DTYPE, gauges.device())
            yield asdict(found) | {"bits": bits, "rate": found.rate}


if __name__ == "__main__":
    rank_main(measure)
