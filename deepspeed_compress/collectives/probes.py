"""Measurements made during training: the accuracy of a compressed mean and the time that messages take."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.exchange import exchange
from deepspeed_compress.compression.segments import Segment, gather

REPEATS = 3


def true_sum(group: ProcessGroup, bucket: Tensor) -> Tensor:
    """Return the uncompressed fp32 sum of `bucket` over the ranks. `bucket` is not changed."""
    total = bucket.to(torch.float32, copy=True)
    group.allreduce([total]).wait()
    return total


def cosine_with_truth(
    group: ProcessGroup, bucket: Tensor, truth: Tensor, own: Sequence[Segment]
) -> Callable[[], float]:
    """Return a function that computes the cosine similarity of `bucket` and `truth` over all ranks' `own` segments.

    The scale of either does not matter. The result is NaN if one of them is zero or non-finite. Collective; the
    returned function waits for the GPU.
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
    """Return the seconds in which this rank exchanges each of `sizes` bytes with the other ranks of `group`.

    The bytes are divided equally among the other ranks, in both directions. Each value is the median of three, because
    traffic shapers let a first burst pass at once. Collective; waits for the GPU. Zeros for a group of one.
    """
    others = group.size() - 1
    if not others:
        return [0.0] * len(sizes)
    seconds = []
    for size in sizes:
        # Allocated one by one: parts of one tensor would not be aligned.
        outgoing, incoming = (
            [torch.zeros(size // others, dtype=torch.uint8, device=device) for _ in range(group.size())]
            for _ in range(2)
        )
        call = partial(exchange, group, outgoing, incoming)
        seconds.append(statistics.median(seconds_of(call, group, device) for _ in range(REPEATS)))
    return seconds


def seconds_of(call: Callable[[], object], group: ProcessGroup, device: torch.device) -> float:
    """Return the seconds of a call, which all ranks of `group` start together. Waits for the GPU."""
    # A late rank must not be mistaken for a slow link.
    group.allreduce([torch.zeros(1, device=device)]).wait()
    _finish(device)
    begin = time.perf_counter()
    call()
    _finish(device)
    return time.perf_counter() - begin


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
