"""One rank of `bench comm --kind`. It times activations in 8 and 4 bits and in bf16, at each size and rate."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from deepspeed_compress.backends.activations.crossover import Crossover, Kind, measure
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.links import set_own_rate
from deepspeed_compress.tools.bench.rows import Emit, Log, Row, rank_main

BITS = (8, 4)
DTYPE = torch.bfloat16
"""Type of uncompressed activations."""


def measure_job(job: Row, emit: Emit, log: Log) -> None:
    """Run the measurement on an emulated host. `job` holds the kind, the rates and the sizes."""
    measure_activations(job["kind"], job["rates"], job["sizes"], emit, log)


def measure_activations(kind: Kind, rates: Sequence[str | None], sizes: Sequence[int], emit: Emit, log: Log) -> None:
    """Measure messages of `sizes` bytes at each rate. Rank 0 reports progress and emits a row for each rate."""
    first = dist.get_rank() == 0
    for rate in rates:
        if first:
            log(f"{kind}{f' at {rate}' if rate else ''}")
        if rate is not None:
            set_own_rate(rate)
        found = [asdict(one) | {"rate": one.rate} for one in _crossovers(kind, sizes)]
        if first:
            emit({"kind": kind, "ranks": dist.get_world_size(), "rate": rate, "messages": found})


def _crossovers(kind: Kind, sizes: Sequence[int]) -> Iterator[Crossover]:
    group, ranks = dist.distributed_c10d._get_default_group(), dist.get_world_size()
    for size in sizes:
        numel = max(1, size // DTYPE.itemsize // ranks) * ranks
        for bits in BITS:
            yield measure(group, kind, bits, numel, DTYPE, gauges.device())


if __name__ == "__main__":
    rank_main(measure_job)
