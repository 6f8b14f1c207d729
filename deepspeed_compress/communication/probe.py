"""How close a compressed mean came to the true one: a diagnostic that costs an uncompressed all-reduce."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.compression.segments import Segment, gather

__all__ = ["cosine_with_truth", "true_sum"]


def true_sum(group: ProcessGroup, bucket: Tensor) -> Tensor:
    """The sum of `bucket` over the ranks in fp32, uncompressed; `bucket` is not changed."""
    total = bucket.to(torch.float32, copy=True)
    group.allreduce([total]).wait()
    return total


def cosine_with_truth(group: ProcessGroup, bucket: Tensor, truth: Tensor, own: Sequence[Segment]) -> float:
    """Cosine similarity between the reduced `bucket` and `truth` over all ranks' own segments.

    The scale of either does not matter. NaN when one of them is zero or non-finite.
    """
    reduced, expected = gather(bucket, own), gather(truth, own)
    products = torch.stack((reduced @ expected, reduced @ reduced, expected @ expected))
    group.allreduce([products]).wait()
    dot, reduced_square, expected_square = products.tolist()
    square = reduced_square * expected_square
    return float(dot / square**0.5) if square > 0 else float("nan")
