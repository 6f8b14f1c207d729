"""Measurements beside training: how close a compressed mean came to the true one, and how long messages take."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.exchange import exchange
from deepspeed_compress.compression.segments import Segment, gather

__all__ = ["cosine_with_truth", "link_seconds", "true_sum"]

REPEATS = 3


def true_sum(group: ProcessGroup, bucket: Tensor) -> Tensor:
    """The sum of `bucket` over the ranks in fp32, uncompressed; `bucket` is not changed."""
    total = bucket.to(torch.float32, copy=True)
    group.allreduce([total]).wait()
    return total


def cosine_with_truth(
    group: ProcessGroup, bucket: Tensor, truth: Tensor, own: Sequence[Segment]
) -> Callable[[], float]:
    """Cosine similarity between the reduced `bucket` and `truth` over all ranks' own segments.

    The scale of either does not matter. NaN when one of them is zero or non-finite. Returns what gives it, which waits
    for a GPU.
    """
    reduced, expected = gather(bucket, own), gather(truth, own)
    products = torch.stack((reduced @ expected, reduced @ reduced, expected @ expected))
    group.allreduce([products]).wait()
    return partial(_cosine, products)


def _cosine(products: Tensor) -> float:
    dot, reduced_square, expected_square = products.tolist()
    square = reduced_square * expected_square
    return float(dot / square**0.5) if square > 0 else float("nan")


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
