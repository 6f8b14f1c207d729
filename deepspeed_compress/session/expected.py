"""Prediction of what one optimizer step will send for gradients, and of what will be kept between steps.

All parameters are assumed to be in a single bucket, so the figures are those of large buckets: with small ones,
per-message overhead takes a larger share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_compress.collectives.buckets import Partition, even_partition, partition_by_sizes
from deepspeed_compress.collectives.reducer import Reducer
from deepspeed_compress.config import CompressedGradients
from deepspeed_compress.session.session import Session

LATE = 10**9
"""Optimizer step after the end of every density warm-up."""
MOST = 64
"""Largest number of steps to average over, if some parameters are sent only every few steps."""


@dataclass(frozen=True)
class Cost:
    """Bytes that a rank sends in a step, and bytes that it keeps between steps."""

    sent: float = 0.0
    kept: float = 0.0


def one_bucket(sizes: Sequence[tuple[str, int]], ranks: int, apart: bool) -> Partition:
    """Return one bucket with all parameters, given as (name, numel), cut evenly among the ranks.

    With `apart`, each parameter is cut evenly instead of the whole bucket.
    """
    if not apart:
        return even_partition(sizes, ranks)
    return partition_by_sizes([(name, _shares(numel, ranks)) for name, numel in sizes], ranks)


def _shares(numel: int, ranks: int) -> list[tuple[int, int]]:
    share = -(-numel // ranks)
    return [(rank, max(0, min(share, numel - rank * share))) for rank in range(ranks)]


def mean_cost(session: Session, partition: Partition, everywhere: bool) -> Cost:
    """Return the mean cost of reducing a bucket cut by `partition` as configured, after all warm-ups.

    It is a mean over steps, because overrides may send only every few steps.

    Args:
        session: the session of the run.
        partition: the owners of the bucket's segments.
        everywhere: reduce to all ranks instead of to the owners.
    """
    gradients = session.config.gradients
    every = [one.every for one in gradients.overrides] if isinstance(gradients, CompressedGradients) else []
    steps = range(LATE, LATE + min(MOST, math.lcm(*every)))
    costs = [cost(session.gradients.chosen_reducer(step, partition), partition, everywhere) for step in steps]
    return Cost(sum(one.sent for one in costs) / len(costs), max(one.kept for one in costs))


def cost(reducer: Reducer, partition: Partition, everywhere: bool) -> Cost:
    """Return the cost of reducing a bucket in one optimizer step."""
    transfers = reducer.transfers(partition, everywhere)
    stored = [*reducer.stored(partition), *(pair for one in transfers for pair in one.stored())]
    return Cost(sum(one.bytes for one in transfers), sum(store.bytes_of(numel) for store, numel in stored))


def uncompressed(reducer: Reducer, partition: Partition) -> set[str]:
    """Return the names of the parameters of `partition` that are always sent uncompressed."""
    transfers = reducer.transfers(partition, everywhere=False)
    compressed = {name for one in transfers for name in one.names() - one.uncompressed_names()}
    return {name for one in transfers for name in one.names()} - compressed
