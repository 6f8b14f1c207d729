"""How long messages take between the ranks of a group: small ones of known size, timed."""

import statistics
import time
from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.exchange import exchange

__all__ = ["link_seconds"]

REPEATS = 3


def link_seconds(group: ProcessGroup, device: torch.device, sizes: Sequence[int]) -> list[float]:
    """Seconds in which this rank sends and receives `sizes` bytes, in equal parts to and from all others: the median of
    three, since shapers let a first burst pass at once. Collective; a GPU is waited for. Zeros for a group of one."""
    return [statistics.median(_once(group, device, size) for _ in range(REPEATS)) for size in sizes]


def _once(group: ProcessGroup, device: torch.device, size: int) -> float:
    others = group.size() - 1
    if not others:
        return 0.0
    outgoing, incoming = (
        [torch.zeros(size // others, dtype=torch.uint8, device=device) for _ in range(group.size())] for _ in range(2)
    )
    # All begin together, so that nobody's lateness is taken for slowness of the link.
    group.allreduce([torch.zeros(1, device=device)]).wait()
    _finish(device)
    begin = time.perf_counter()
    exchange(group, outgoing, incoming)
    _finish(device)
    return time.perf_counter() - begin


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
