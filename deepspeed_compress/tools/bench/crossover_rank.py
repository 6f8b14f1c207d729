"""One rank of `bench comm --kind`. It times activations in 8 and 4 bits and in bf16, at each size and rate."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from deepspeed_compress.backends.activations.crossover import Kind
from deepspeed_compress.backends.activations.crossover import measure as measure_message
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.jobs import Emit, Log, rank_main
from deepspeed_compress.tools.bench.links import set_own_rate
from deepspeed_compress.tools.bench.rows import Row

BITS = (8, 4)
DTYPE = torch.bfloat16
"""Type of uncompressed activations."""


def measure(job: Row, emit: Emit, log: Log) -> None:
    """Measure messages at each rate, and emit a row for each rate.

    `job` holds the kind of messages, the rates, and the sizes in bytes.
    """
    kind = job["kind"]
    for rate in job["rates"]:
        log(f"{kind}{f' at {rate}' if rate else ''}")
        if rate is not None:
            set_own_rate(rate)
        emit({"kind": kind, "ranks": dist.get_world_size(), "rate": rate, "messages": list(_rows(kind, job["sizes"]))})


def _rows(kind: Kind, sizes: Sequence[int]) -> Iterator[Row]:
    group = dist.distributed_c10d._get_default_group()
    for size in sizes:
        for bits in BITS:
            found = measure_message(group, kind, [bits], size // DTYPE.itemsize, DTYPE, gauges.device())
            yield asdict(found) | {"bits": bits, "rate": found.rate}


if __name__ == "__main__":
    rank_main(measure)
