"""Default sizes of the buckets in which DeepSpeed reduces gradients and gathers weights."""

from typing import Any

from deepspeed_compress.session.patches import Patches

BUCKETS = 8
"""Target number of gradient buckets per model. `SMALLEST_BUCKET` and `LARGEST_BUCKET` take precedence."""
SMALLEST_BUCKET, LARGEST_BUCKET = 1_000_000, 50_000_000
SHARE_OF_RANK, LARGEST_OF_MANY = 4_000_000, 500_000_000
"""Elements of each rank in the largest bucket of many ranks, and the size that no bucket exceeds."""


def bucket_size(numel: int, ranks: int) -> int:
    """Return the default bucket size, in elements, for a model with `numel` trained elements.

    It is small enough for the first buckets to travel during backward, and large enough to hide latency. Each rank
    sends a message to each other one per bucket, which costs a GPU's host about 0.1 ms, so many ranks get larger
    buckets.
    """
    largest = min(max(LARGEST_BUCKET, ranks * SHARE_OF_RANK), LARGEST_OF_MANY)
    return min(max(numel // BUCKETS, SMALLEST_BUCKET), largest)


def limit_bucket_size(engine: Any, numel: int, patches: Patches) -> None:
    """Let a ZeRO optimizer reduce in buckets of our default size, unless the file has a size.

    DeepSpeed's default of 500 million elements would send most models in one bucket, after backward.

    Args:
        engine: the engine.
        numel: the number of elements that the ranks of the engine train.
        patches: restores DeepSpeed's size.
    """
    written = engine.config.get("zero_optimization")
    if not isinstance(written, dict) or "reduce_bucket_size" not in written:
        ranks = engine.optimizer.dp_process_group.size()
        patches.replace(engine.optimizer, "reduce_bucket_size", bucket_size(numel, ranks))
